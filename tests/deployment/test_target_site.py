"""The unseen domain on a site of its own, which evaluates and never trains; its replies are checked like a client's."""

import os

import numpy as np
import pandas as pd
import pytest
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from sites import run_on_sites
from support import Interrupt, numbers, run_small, tiny_experiment

import fedsim.run.serve
from fedsim.common.errors import ClientFailedError, UserError
from fedsim.runtime.launch import launch
from strategies.wire.reply_checks import Expected, RejectedReplyError, judged
from strategies.wire.target_site import read_score

METHODS = {
    "fedavg": "fedavg",
    "ccst": {"name": "ccst", "cross_client_style": {"encoder": "pixel"}},
    "fedig-a": "fedig-a",
    "ensemble": {"name": "fedbn", "infer": "ensemble_of_local_bn"},
    "fada": {"name": "fada", "adversarial_target": {"sample": 16}},  # the target's site answers the server's visits
    "gperxan": "gperxan",
    "mixnorm": {"name": "fedavg", "infer": "mix_norm"},
    "tsmobn": {"name": "fedavg", "infer": "tsmo_bn"},
}
SLOW = ("gperxan", "mixnorm", "tsmobn")


def on_site(output, method="fedavg", rounds=1, **run):
    return tiny_experiment(output, method, rounds, run={"evaluate_target": "site", **run})


def assert_same(table, wanted, columns):
    pd.testing.assert_frame_equal(table[columns], wanted[columns], check_exact=True)


@pytest.mark.parametrize("method", [pytest.param(m, marks=pytest.mark.slow if m in SLOW else []) for m in METHODS])
def test_numbers_are_those_of_the_servers_evaluation(method, tmp_path):
    """Everything that the inference rule needs (clients' uploads, the order of images) is sent with the model."""
    rounds = 2 if method == "fada" else 1  # its target trains from the second round on
    server, _ = run_small(tiny_experiment(tmp_path / "server", METHODS[method], rounds))
    site, _ = run_on_sites(on_site(tmp_path / "site", METHODS[method], rounds), tmp_path / "state")
    for file in ("rounds.csv", "details.csv"):
        if (server / file).is_file():
            wanted = numbers(server / file)
            assert_same(numbers(site / file), wanted, [name for name in wanted if not name.startswith("bytes")])


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(folder, grid, state folder) of a run whose server cannot evaluate, with a source site of the unseen domain."""
    place = tmp_path_factory.mktemp("ran")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedsim.run.serve, "TargetEvaluator", None)
        return *run_on_sites(on_site(place, rounds=2), place / "state", spare=("rot45",)), place / "state"


def test_nobody_but_the_target_site_opens_the_target(ran):
    """A source of the unseen domain takes part only in the handshake, and the target site refuses to train."""
    folder, grid, state = ran
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


def metrics(**values):
    def change(content):
        content["metrics"] = MetricRecord({**content.metric_records["metrics"], **values})

    return change


def replaced(name, **values):
    return lambda content: content.update({name: ConfigRecord({**content.config_records[name], **values})})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (metrics(accuracy=1.5), "not between 0 and 1"),
        (metrics(accuracy=float("nan")), "not a finite number"),
        (metrics(loss=float("inf")), "not a finite number"),
        (metrics(**{"num-examples": 7}), "the handshake said"),
        (replaced("echo", round=100), "another message: round"),
        (lambda content: content.pop("metrics"), "missing metric records"),
        (replaced("details", quantities=["a"], names=[], values=[1.0]), "cannot be judged"),
    ],
)
def test_a_wrong_evaluation_is_refused(ran, change, reason):
    message, reply = next(pair for pair in ran[1].seen if pair[0].metadata.message_type == "query.target")
    asked, examples = message.content.config_records["config"], reply.content["metrics"]["num-examples"]
    expected = Expected("rot45", asked["token"], asked["round"], asked["phase"], examples)
    score, _ = judged(read_score, reply.content, expected)
    assert 0 <= score.value <= 1
    content = RecordDict(dict(reply.content))
    change(content)
    with pytest.raises(RejectedReplyError, match=reason):
        judged(read_score, content, expected)


def tamper(message, reply):
    """The target's site gives a wrong accuracy in round 1 and fails in round 2."""
    round = message.content.config_records["config"]["round"]
    if message.metadata.message_type != "query.target" or round not in (1, 2):
        return reply
    if round == 2:
        return Message(Error(2, "Traceback ...\nRuntimeError: disk full"), reply_to=message)
    content = RecordDict(dict(reply.content))
    metrics(accuracy=1.5)(content)
    return Message(content, reply_to=message)


def test_a_wrong_evaluation_leaves_a_gap_when_asked(tmp_path):
    """The round has no target accuracy; training, selection and the other rounds stay as they were."""
    unbroken, _ = run_small(tiny_experiment(tmp_path / "unbroken", rounds=3))
    experiment = on_site(tmp_path / "broken", rounds=3, on_client_failure="continue")
    folder, _ = run_on_sites(experiment, tmp_path / "state", tamper=tamper)
    rounds, wanted = numbers(folder / "rounds.csv"), numbers(unbroken / "rounds.csv")
    assert list(rounds["failed"]) == [0, 1, 1, 0]
    wanted.loc[[1, 2], ["target_accuracy", "target_loss"]] = np.nan
    assert_same(rounds, wanted, ["train_loss", "mean_validation_accuracy", "target_accuracy", "target_loss"])
    statuses = pd.read_csv(folder / "clients.csv").query("client == 'rot45'").set_index("round")["status"]
    for round, said in ((1, "not between 0 and 1"), (2, "RuntimeError: disk full")):
        assert said in statuses[round]
    assert (folder / "summary.csv").is_file()
    with pytest.raises(ClientFailedError, match=r"client 'rot45' failed in round 1: .*not between 0 and 1"):
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


def test_no_target_site_is_said_by_name_after_a_bounded_wait(tmp_path):
    with pytest.raises(ClientFailedError, match=r"no node for rot45 within 0.1 s; online: rot0, rot15, rot30"):
        run_small(on_site(tmp_path, wait_for_sites=0.1))
    with pytest.raises(UserError):
        on_site(tmp_path, evaluate_target="nowhere")


@pytest.mark.parametrize("runtime", ["inline", "ray", "flower"])
def test_only_a_deployment_has_a_target_site(runtime, tmp_path):
    """It is refused at once, and not after a wait for the site."""
    with pytest.raises(UserError, match=r"run\.evaluate_target = 'site' is a setting of run\.runtime = 'deployment'"):
        launch(on_site(tmp_path, runtime=runtime, wait_for_sites=0.2))
