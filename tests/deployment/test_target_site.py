"""The unseen domain on a site of its own, which evaluates and never trains; its replies are checked like a client's."""

import numpy as np
import pandas as pd
import pytest
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from sites import run_on_sites
from support import Interrupt, numbers, run_small, small_experiment

import fedsim.run.serve
from fedsim.common.errors import ClientFailedError, UserError
from fedsim.runtime.launch import launch

METHODS = {
    "fedavg": "fedavg",
    "fedbn": "fedbn",
    "gperxan": "gperxan",
    "ccst": {"name": "ccst", "cross_client_style": {"encoder": "pixel"}},
    "fedig-a": "fedig-a",
    "ensemble": {"name": "fedbn", "infer": "ensemble_of_local_bn"},
    "mixnorm": {"name": "fedavg", "infer": "mix_norm"},
    "tsmobn": {"name": "fedavg", "infer": "tsmo_bn"},
    "fada": "fada",  # the target's site answers the server's visits
}
LONG = [pytest.param(name, marks=pytest.mark.slow) for name in ("gperxan", "mixnorm", "tsmobn")]


def on_site(output, method="fedavg", **sections):
    """The small experiment with the target on a site."""
    sections["run"] = {"evaluate_target": "site", **sections.get("run", {})}
    return small_experiment(output, method, **sections)


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "ccst", "fedig-a", "ensemble", "fada", *LONG])
def test_numbers_are_those_of_the_servers_evaluation(method, tmp_path):
    """Everything that the inference rule needs (clients' uploads, the order of images) is sent with the model."""
    two = {"train": {"rounds": 2}}
    server, _ = run_small(small_experiment(tmp_path / "server", METHODS[method], **two))
    site, _ = run_on_sites(on_site(tmp_path / "site", METHODS[method], **two), tmp_path / "state")
    for file in ("rounds.csv", "details.csv"):
        if (server / file).is_file():
            wanted = numbers(server / file)
            columns = [column for column in wanted if not column.startswith("bytes")]
            pd.testing.assert_frame_equal(numbers(site / file)[columns], wanted[columns], check_exact=True)


def test_nobody_but_the_target_site_opens_the_target(tmp_path, monkeypatch):
    """The server does not evaluate, and the target's site gets no messages for training or validation."""
    monkeypatch.setattr(fedsim.run.serve, "TargetEvaluator", None)
    experiment = on_site(tmp_path)
    folder, grid = run_on_sites(experiment, tmp_path / "state")
    kinds = {}
    for message, _ in grid.seen:
        domain = grid.contexts[message.metadata.dst_node_id].node_config["domain"]
        kinds.setdefault(domain, set()).add(message.metadata.message_type)
    assert kinds.pop("rot45") == {"query.handshake", "query.target"}
    assert all(seen == {"query.handshake", "train", "evaluate"} for seen in kinds.values())
    clients = pd.read_csv(folder / "clients.csv")
    target = clients[clients["client"] == "rot45"]
    assert list(target["round"]) == [0, 1, 2, 3]
    assert (target["bytes_down"] > 0).all()
    assert target["weight"].isna().all()


def test_a_source_site_of_the_target_stays_idle(tmp_path):
    """A machine that holds the unseen domain as a source takes part only in the handshake."""
    _, grid = run_on_sites(on_site(tmp_path), tmp_path / "state", spare=("rot45",))
    spare = next(
        node
        for node, context in grid.contexts.items()
        if (context.node_config["domain"], context.node_config["role"]) == ("rot45", "source")
    )
    assert {m.metadata.message_type for m, _ in grid.seen if m.metadata.dst_node_id == spare} == {"query.handshake"}
    assert not list((tmp_path / "state" / "source-rot45").glob("runs/*/*"))


def tamper_with_target(change, rounds=(2,)):
    """Changes the target site's reply in the given rounds."""

    def tamper(message, reply):
        config = message.content.config_records["config"]
        if message.metadata.message_type != "query.target" or config["round"] not in rounds:
            return reply
        content = RecordDict(dict(reply.content))
        changed = change(content, message)
        return changed if isinstance(changed, Message) else Message(content, reply_to=message)

    return tamper


def metrics(**values):
    def change(content, message):
        content["metrics"] = MetricRecord({**content.metric_records["metrics"], **values})

    return change


def raised(content, message):
    return Message(Error(2, "Traceback ...\nRuntimeError: disk full"), reply_to=message)


def other_round(content, message):
    content["echo"] = ConfigRecord({**content.config_records["echo"], "round": 1})


def no_metrics(content, message):
    del content["metrics"]


def odd_details(content, message):
    content["details"] = ConfigRecord({"quantities": ["a"], "names": [], "values": [1.0]})


FAULTS = {
    "too good": (metrics(accuracy=1.5), "not between 0 and 1"),
    "nan": (metrics(accuracy=float("nan")), "not a finite number"),
    "infinite loss": (metrics(loss=float("inf")), "not a finite number"),
    "other images": (metrics(**{"num-examples": 7}), "the handshake said"),
    "other round": (other_round, "another message: round"),
    "no metrics": (no_metrics, "missing metric records"),
    "odd details": (odd_details, "cannot be judged"),
    "raised": (raised, "RuntimeError: disk full"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_evaluation_stops_the_run_by_name(fault, tmp_path):
    """This is the default."""
    change, reason = FAULTS[fault]
    with pytest.raises(ClientFailedError, match="client 'rot45' failed in round 2") as error:
        run_on_sites(on_site(tmp_path), tmp_path / "state", tamper=tamper_with_target(change))
    assert reason in str(error.value)


@pytest.mark.parametrize("fault", ["too good", "raised"])
def test_a_wrong_evaluation_leaves_a_gap_when_asked(fault, tmp_path):
    """With `continue` the round has no target accuracy; training, selection and the other rounds stay as they were."""
    change, reason = FAULTS[fault]
    unbroken, _ = run_small(small_experiment(tmp_path / "unbroken"))
    experiment = on_site(tmp_path / "broken", run={"on_client_failure": "continue"})
    folder, _ = run_on_sites(experiment, tmp_path / "state", tamper=tamper_with_target(change))
    rounds, wanted = numbers(folder / "rounds.csv"), numbers(unbroken / "rounds.csv")
    assert list(rounds["target_accuracy"].isna()) == [False, False, True, False]
    assert list(rounds["failed"]) == [0, 0, 1, 0]
    wanted.loc[2, ["target_accuracy", "target_loss"]] = np.nan
    columns = ["train_loss", "mean_validation_accuracy", "target_accuracy", "target_loss"]
    pd.testing.assert_frame_equal(rounds[columns], wanted[columns], check_exact=True)
    clients = pd.read_csv(folder / "clients.csv")
    row = clients[(clients["client"] == "rot45") & (clients["round"] == 2)].iloc[0]
    assert reason in row["status"]
    assert (folder / "summary.csv").is_file()


def test_interrupted_and_resumed(tmp_path):
    """The states on the sites and the checkpoint on the server belong to the same round."""
    unbroken, _ = run_small(small_experiment(tmp_path / "unbroken", "fedbn"))
    experiment = on_site(tmp_path / "broken", "fedbn")
    with pytest.raises(KeyboardInterrupt):
        run_on_sites(experiment, tmp_path / "state", Interrupt(2))
    folder, _ = run_on_sites(experiment, tmp_path / "state")
    columns = ["round", "train_loss", "mean_validation_accuracy", "target_accuracy"]
    pd.testing.assert_frame_equal(
        numbers(folder / "rounds.csv")[columns], numbers(unbroken / "rounds.csv")[columns], check_exact=True
    )
    (state,) = (tmp_path / "state" / "source-rot0" / "runs").iterdir()
    assert list(state.glob("*/personal-*.safetensors"))


def test_a_target_site_refuses_to_train(tmp_path):
    """It refuses even if the server asks it to train."""
    experiment = on_site(tmp_path)
    _, grid = run_on_sites(experiment, tmp_path / "state")
    order = next(message for message, _ in grid.seen if message.metadata.message_type == "train")
    target = grid.node_ids[-1]
    (reply,) = grid.send_and_receive([Message(order.content, target, "train")])
    assert reply.has_error()
    assert "does not train" in reply.error.reason


def test_two_runs_on_the_same_sites_do_not_mix(tmp_path):
    """Each run has its own folder below the site's state folder."""
    for seed in (0, 1):
        run_on_sites(on_site(tmp_path / str(seed), "fedbn", run={"seed": seed}), tmp_path / "state")
    assert len(list((tmp_path / "state" / "source-rot0" / "runs").iterdir())) == 2


def test_state_of_old_runs_is_removed(tmp_path):
    """It is removed a month after its last use."""
    import os

    run_on_sites(on_site(tmp_path / "a", "fedbn"), tmp_path / "state")
    (old,) = (tmp_path / "state" / "source-rot0" / "runs").iterdir()
    os.utime(old, (1e9, 1e9))
    run_on_sites(on_site(tmp_path / "b", "fedbn"), tmp_path / "state")
    assert not old.exists()


def test_no_target_site_is_said_by_name(tmp_path):
    """The wait has a limit."""
    experiment = on_site(tmp_path, run={"wait_for_sites": 0.2})
    with pytest.raises(ClientFailedError, match=r"no node for rot45 within 0.2 s; online: rot0, rot15, rot30"):
        run_small(experiment)
    with pytest.raises(UserError):
        small_experiment(tmp_path, run={"evaluate_target": "nowhere"})


@pytest.mark.parametrize("runtime", ["inline", "ray", "flower"])
def test_only_a_deployment_has_a_target_site(runtime, tmp_path):
    """It is refused at once, and not after a wait for the site."""
    with pytest.raises(UserError, match=r"run\.evaluate_target = 'site' is a setting of run\.runtime = 'deployment'"):
        launch(on_site(tmp_path, run={"runtime": runtime, "wait_for_sites": 0.2}))
