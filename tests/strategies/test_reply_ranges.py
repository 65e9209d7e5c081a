"""Numbers of replies that are out of range, and records that nobody asked for, are refused before they are recorded."""

import numpy as np
import pandas as pd
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from support import run_small, small_experiment

from fedsim.tensors.arrays import record_to_arrays, state_to_record
from strategies.wire.fused_check import finite_loss
from strategies.wire.guard import Guard
from strategies.wire.reply_checks import Expected, RejectedReplyError, check_metrics, check_validation, judged
from strategies.wire.target_site import TargetScore, read_score, score_records

ECHO = {"token": "t", "client": "rot75", "round": 3, "phase": "target"}
EXPECTED = Expected("rot75", "t", 3, "target", 100)


@pytest.mark.parametrize(("name", "value"), [
    ("local_validation_accuracy", 2.0), ("local_validation_dice", -0.1), ("personal_accuracy", 7.0),
    ("train_seconds", -1.0), ("compile_seconds", -1e30), ("steps", -3), ("images", -1), ("gradient_count", -1.0),
    ("learning_rate", -0.0999), ("received_loss", -1e30),
])  # fmt: skip
def test_a_training_metric_out_of_range_is_refused(name, value):
    """A local accuracy of 2 would select its round. With a negative learning rate the clients' sum may be near 0."""
    good = {"local_validation_accuracy": 1.0, "train_seconds": 0.0, "steps": 0, "learning_rate": 0.0, "gap": -1.0}
    check_metrics(good | {"train_loss": -0.3, "personal_train_loss": 40.0}, {"train_loss"})
    with pytest.raises(RejectedReplyError, match=f"{name} is "):
        check_metrics(good | {name: value}, set())


@pytest.mark.parametrize(
    "change", [{"loss": -1e30}, {"evaluation_seconds": -5.0}, {"personal_accuracy": 1.1}, {"personal_loss": -1.0}]
)
def test_a_validation_out_of_range_is_refused(change):
    """A loss that is 0 up to rounding is accepted."""
    good = {"num-examples": 9, "accuracy": 1.0, "loss": -1e-8, "evaluation_seconds": 0.1}

    def reply(metrics):
        return RecordDict({"metrics": MetricRecord(metrics), "echo": ConfigRecord(ECHO)})

    assert check_validation(reply(good), EXPECTED)["validation_examples"] == 9
    with pytest.raises(RejectedReplyError, match=f"{next(iter(change))} is "):
        check_validation(reply(good | change), EXPECTED)


def tampered_run(tmp_path, phase, change, method="fedavg", **run):
    """The victim's row of round 1 when `change(content)` has changed its reply of a phase; the others are well."""

    def tamper(message, reply):
        config = message.content["config"]
        if (config["phase"], config["client"], config["round"]) == (phase, "rot15", 1):
            change(reply.content)
        return reply

    run, train = {"on_client_failure": "continue", **run}, {"rounds": 1, "iterations": 1}
    experiment = small_experiment(tmp_path, method, train=train, run=run, data={"fraction": 0.05})
    folder, _ = run_small(experiment, tamper=tamper)
    clients = pd.read_csv(folder / "clients.csv").query("round == 1").set_index("client")
    assert clients.drop("rot15")["status"].eq("ok").all()
    return clients.loc["rot15"]


def test_a_validation_of_10_to_the_9_images_is_refused(tmp_path):
    """It is out of proportion to the other sites' numbers and to the site's own training examples."""
    row = tampered_run(tmp_path, "evaluate", lambda content: content["metrics"].update({"num-examples": 10**9}))
    assert "validation refused: it reports 1000000000 examples" in row["status"]
    assert pd.isna(row["validation_examples"])


def target_reply(metrics=None, details=None, extra=None):
    content = score_records(TargetScore(0.5, 1.0, 0.1, [("alpha_mean", "layer1.0", 0.5)]), 100, "accuracy")
    content["metrics"] = MetricRecord({**content["metrics"], **(metrics or {})})
    content["details"] = ConfigRecord({**content["details"], **(details or {})})
    return RecordDict({**content, "echo": ConfigRecord(ECHO), **(extra or {})})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"extra": {"evil": ArrayRecord([np.ones(3)])}}, "unexpected array records"),
        ({"extra": {"more": ConfigRecord({"a": 1})}}, "unexpected config records"),
        ({"metrics": {"target_accuracy": 1.0}}, "unexpected metrics"),
        ({"metrics": {"loss": -1e30}}, "loss is"),
        ({"metrics": {"loss": 1.2e36}}, "metric 'loss' is larger than 1e\\+30 in size: 1.2e"),
        ({"metrics": {"loss": float("nan")}}, "metric 'loss' is not a finite number: nan"),
        ({"metrics": {"evaluation_seconds": -1e30}}, "evaluation_seconds is"),
        ({"metrics": {"accuracy": 2.0}}, "accuracy is"),
        ({"details": {"names": ["=cmd\nround,9"]}}, "not one printable line"),
        ({"details": {"quantities": [b"\xff"]}}, "not one printable line"),
        ({"details": {"names": ["n" * 1000]}}, "not one printable line"),
        ({"details": {"values": [float("inf")]}}, "not a finite number"),
        ({"details": {name: ["n"] * 100_000 for name in ("names", "quantities")}}, "rows"),
        ({"details": {"names": []}}, "cannot be judged"),
        ({"details": {"names": "a", "quantities": "a"}}, "three lists"),
        ({"details": {"more": [1]}}, "three lists"),
    ],
)
def test_the_target_sites_reply_is_exactly_what_was_asked_for(change, reason):
    score, seconds = judged(read_score, target_reply(), EXPECTED)
    assert (score.value, score.details, seconds) == (0.5, [("alpha_mean", "layer1.0", 0.5)], 0.1)
    judged(read_score, target_reply(details={"quantities": [], "names": [], "values": []}), EXPECTED)
    with pytest.raises(RejectedReplyError, match=reason):
        judged(read_score, target_reply(**change), EXPECTED)


@pytest.mark.parametrize("value", [-5, 2**63 - 1])
def test_under_secure_mean_counters_are_still_checked(tmp_path, value):
    """Integer tensors are not masked, so that the largest of them would become the model's."""

    def change(content):
        arrays = record_to_arrays(content["arrays"])
        new = {n: np.full_like(a, value) if "num_batches" in n else np.array(a) for n, a in arrays.items()}
        content["arrays"] = state_to_record(new)

    row = tampered_run(tmp_path, "train", change, {"name": "fedavg", "fuse": "secure_mean"}, update_limit=0.0)
    assert "has a negative value, or a count" in row["status"]


def test_a_large_value_in_the_model_before_does_not_switch_the_probe_off():
    """Running variances of honest models may be above 1e4."""
    guard = Guard(0.0, lambda arrays: bool(arrays["w"].max() < 1e30))
    previous = {"w": np.array([2e4], np.float32)}
    assert "not finite" in guard.unusable({"w": np.array([3e38], np.float32)}, previous)
    assert guard.unusable(previous, previous) == ""
    assert guard.unusable({"w": np.array([3e38], np.float32)}, {"w": np.array([3e38], np.float32)}) == ""


@pytest.mark.parametrize(("loss", "finite"), [(0.5, True), (10**400, True), (float("nan"), False), ("1", False)])
def test_a_loss_of_any_size_is_judged(loss, finite):
    assert finite_loss({"metrics": {"loss": loss}}) is finite
