"""The unseen domain on a site of its own, which evaluates and never trains; its replies are checked like a client's."""

import os

import numpy as np
import pandas as pd
import pytest
from flwr.app import Error, Message, MetricRecord, RecordDict
from sites import run_on_sites
from support import Interrupt, numbers, run_small, tiny_experiment

import fedsim.runs.serve
from fedsim.common.errors import ClientFailedError, UserError
from fedsim.deploy.certificates import write_site_key
from fedsim.runtime.launch import launch
from fedsim.tensors.arrays import state_to_record
from strategies.banks.secure_exchange import KEYS
from strategies.tools import masking

METHODS = {
    "ccst": {"name": "ccst", "cross_client_style": {"encoder": "pixel"}},
    "ensemble": {"name": "fedbn", "infer": "ensemble_of_local_bn"},
    "fada": {"name": "fada", "adversarial_target": {"sample": 16}},  # the target's site answers the server's visits
    "tsmobn": {"name": "fedavg", "infer": "tsmo_bn"},
}


def on_site(output, method="fedavg", rounds=1, **run):
    return tiny_experiment(output, method, rounds, run={"evaluate_target": "site", **run})


def assert_same(table, wanted, columns):
    pd.testing.assert_frame_equal(table[columns], wanted[columns], check_exact=True)


@pytest.mark.parametrize("method", METHODS)
def test_numbers_are_those_of_the_servers_evaluation(method, tmp_path):
    """Everything that the inference rule needs (clients' uploads, the order of images) is sent with the model."""
    rounds = 2 if method == "fada" else 1  # its target trains from the second round on
    server, _ = run_small(tiny_experiment(tmp_path / "server", METHODS[method], rounds))
    site, _ = run_on_sites(on_site(tmp_path / "site", METHODS[method], rounds), tmp_path / "state")
    for file in ("rounds.csv", "details.csv"):
        if (server / file).is_file():
            wanted = numbers(server / file)
            assert_same(numbers(site / file), wanted, [name for name in wanted if not name.startswith("bytes")])


def test_nobody_but_the_target_site_opens_the_target(tmp_path, monkeypatch):
    """A source of the unseen domain takes part only in the handshake, and the target site refuses to train."""
    monkeypatch.setattr(fedsim.runs.serve, "TargetEvaluator", None)
    state = tmp_path / "state"
    folder, grid = run_on_sites(on_site(tmp_path, rounds=2), state, spare=("rot45",))
    kinds = {}
    for message, _ in grid.seen:
        config = grid.contexts[message.metadata.dst_node_id].node_config
        kinds.setdefault((config["domain"], config["role"]), set()).add(message.metadata.message_type)
    trains = {"query.handshake", "train", "evaluate"}
    assert kinds == {
        **{(domain, "source"): trains for domain in ("rot0", "rot15", "rot30")},
        ("rot45", "source"): {"query.handshake"},
        ("rot45", "target"): {"query.handshake", "query.target"},
    }
    assert not list((state / "source-rot45").glob("runs/*/*"))
    target = pd.read_csv(folder / "clients.csv").query("client == 'rot45'")
    assert list(target["round"]) == [0, 1, 2]
    assert (target["bytes_down"] > 0).all()
    assert target["weight"].isna().all()
    order = next(message for message, _ in grid.seen if message.metadata.message_type == "train")
    (reply,) = grid.send_and_receive([Message(order.content, grid.node_ids[-1], "train")])
    assert "does not train" in reply.error.reason


def tamper(message, reply):
    """The target's site says a wrong loss in round 1, which no client validates, and fails in round 2."""
    round = message.content.config_records["config"]["round"]
    if message.metadata.message_type != "query.target" or round not in (1, 2):
        return reply
    if round == 2:
        return Message(Error(2, "Traceback ...\nRuntimeError: disk full"), reply_to=message)
    metrics = MetricRecord({**reply.content.metric_records["metrics"], "loss": float("nan")})
    return Message(RecordDict({**reply.content, "metrics": metrics}), reply_to=message)


def test_a_wrong_evaluation_leaves_a_gap_when_asked(tmp_path):
    """The round has no target accuracy; training, selection and the other rounds stay as they were."""
    unbroken, _ = run_small(tiny_experiment(tmp_path / "unbroken", rounds=3, train={"evaluate_every": 2}))
    experiment = on_site(tmp_path / "broken", rounds=3, on_client_failure="continue")
    experiment = experiment.replace(train={"evaluate_every": 2})
    folder, _ = run_on_sites(experiment, tmp_path / "state", tamper=tamper)
    rounds, wanted = numbers(folder / "rounds.csv"), numbers(unbroken / "rounds.csv")
    assert list(rounds["failed"]) == [0, 1, 1, 0]
    wanted.loc[[1, 2], ["target_accuracy", "target_loss"]] = np.nan
    assert_same(rounds, wanted, ["train_loss", "mean_validation_accuracy", "target_accuracy", "target_loss"])
    statuses = pd.read_csv(folder / "clients.csv").query("client == 'rot45'").set_index("round")["status"]
    assert ["'loss' is not a finite number" in statuses[1], "RuntimeError: disk full" in statuses[2]] == [True, True]
    assert (folder / "summary.csv").is_file()
    with pytest.raises(ClientFailedError, match=r"client 'rot45' failed in round 1: .*'loss' is not a finite number"):
        run_on_sites(on_site(tmp_path / "stops"), tmp_path / "state", tamper=tamper)


def test_interrupted_and_resumed(tmp_path):
    """The states on the sites and the checkpoint on the server belong to the same round."""
    unbroken, _ = run_small(tiny_experiment(tmp_path / "unbroken", "fedbn", 3))
    experiment = on_site(tmp_path / "broken", "fedbn", 3)
    with pytest.raises(KeyboardInterrupt):
        run_on_sites(experiment, tmp_path / "state", Interrupt(2))
    folder, _ = run_on_sites(experiment, tmp_path / "state")
    columns = ["round", "train_loss", "mean_validation_accuracy", "target_accuracy"]
    assert_same(numbers(folder / "rounds.csv"), numbers(unbroken / "rounds.csv"), columns)
    (state,) = (tmp_path / "state" / "source-rot0" / "runs").iterdir()
    assert list(state.glob("*/personal-*.safetensors"))


def test_two_runs_have_a_state_folder_each_which_goes_a_month_after_its_last_use(tmp_path):
    states = tmp_path / "state" / "source-rot0" / "runs"
    for seed in (0, 1):
        run_on_sites(on_site(tmp_path / str(seed), "fedbn", seed=seed), tmp_path / "state")
    old, _ = found = list(states.iterdir())
    os.utime(old, (1e9, 1e9))
    run_on_sites(on_site(tmp_path / "2", "fedbn", seed=2), tmp_path / "state")
    assert not old.exists()
    assert len(list(states.iterdir())) == len(found) == 2


@pytest.mark.parametrize("runtime", ["inline", "ray", "flower"])
def test_only_a_deployment_has_a_target_site(runtime, tmp_path):
    """It is refused at once, and not after a wait for the site."""
    with pytest.raises(UserError, match=r"run\.evaluate_target = 'site' is a setting of run\.runtime = 'deployment'"):
        launch(on_site(tmp_path, runtime=runtime, wait_for_sites=0.2))


def replaced(message, reply):
    """The server has keys of its own in the place of rot15's."""
    config = message.content.config_records["config"]
    if config.get("bank") == KEYS and config["client"] == "rot15":
        line = masking.entry(masking.new_key(), masking.new_key(), 40)
        reply.content[KEYS] = state_to_record({"line": np.frombuffer(line + bytes(masking.SIGNATURE), np.uint8)})
    return reply


def test_a_run_on_sites_signs_keys_and_ends_where_the_server_replaces_them(tmp_path):
    """The sites' kits have a file `peers`."""
    write_site_key("all", tmp_path / "key", tmp_path / "key.pub")  # one machine for all sites
    line = " ".join((tmp_path / "key.pub").read_text().split()[:2])
    (tmp_path / "peers").write_text("".join(f"{line} {domain}\n" for domain in ("rot0", "rot15", "rot30")))
    method, own = {"name": "fedavg", "fuse": "secure_mean"}, {"evaluate_target": "site", "update_limit": 0.0}
    peers = str(tmp_path / "peers")
    _, grid = run_on_sites(tiny_experiment(tmp_path / "a", method, 1, run=own), tmp_path / "s", peers=peers)
    sizes = [reply.content[KEYS]["line"].numpy().size for message, reply in grid.seen
             if message.content.config_records["config"].get("bank") == KEYS]  # fmt: skip
    assert sizes == [masking.ENTRY + masking.SIGNATURE] * 3
    wrong = tiny_experiment(tmp_path / "b", method, 1, run=own)
    with pytest.raises(UserError, match="'rot15' are not signed by its site"):
        run_on_sites(wrong, tmp_path / "t", tamper=replaced, peers=peers)
