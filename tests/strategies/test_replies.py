"""Replies that must not touch the global model: each is refused by name with its reason. Banks in whole runs."""

import math
from functools import partial

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from support import run_small, small_experiment
from tampering import VICTIM, arrays, refused_row, rows_of, set_nan, short, tamper

from fedsim.common.errors import ClientFailedError
from fedsim.methods.table import METHODS
from fedsim.tensors.arrays import record_to_arrays, state_to_record
from strategies.stored import heads_of
from strategies.wire.reply_checks import (
    Expected,
    RejectedReplyError,
    check_metrics,
    check_update,
    checked,
    reported_loss,
)
from strategies.wire.target_site import DetailForm, TargetScore, read_score, score_records


def check_reason(check, content, expected, reason):
    """It is accepted when the reason is empty."""
    found = ""
    try:
        checked(check, content, expected)
    except RejectedReplyError as error:
        found = str(error)
    assert reason in found
    assert bool(found) == bool(reason)


MARK = 0.125  # every value of a record that a bank cannot measure
MODEL = {"head.weight": np.ones((10, 50), np.float32), "head.bias": np.ones(10, np.float32)}
UPDATE = Expected(VICTIM, "t", 1, "train", 80, shapes=heads_of(MODEL))


@pytest.mark.parametrize(("change", "reason"), [
    (lambda a, m, e: None, ""),
    (lambda a, m, e: set_nan(a), "NaN or infinite"),
    (lambda a, m, e: a.pop("head.bias"), "missing tensors ['head.bias']"),
    (lambda a, m, e: a.update(extra=np.zeros(3, np.float32)), "unexpected tensors ['extra']"),
    (lambda a, m, e: a.update({"head.weight": a["head.weight"].T.copy()}), "'head.weight' is"),
    (lambda a, m, e: a.update({"head.weight": a["head.weight"].astype(np.float64)}), "float64"),
    (lambda a, m, e: m.update({"num-examples": 10**12}), "the handshake said"),
    (lambda a, m, e: m.update({"num-examples": 0}), "not a positive integer"),
    (lambda a, m, e: m.update({"num-examples": 80.5}), "not a positive integer"),
    (lambda a, m, e: m.update(train_loss=float("nan")), "not a finite number"),
    (lambda a, m, e: e.update(round=2), "another message: round"),
    (lambda a, m, e: e.update(token="0" * 16), "another message: token"),
])  # fmt: skip
def test_what_is_wrong_with_a_reply(change, reason):
    own = {name: array.copy() for name, array in MODEL.items()}
    metrics = {"num-examples": 80, "train_loss": 1.0, "train_seconds": 0.1}
    echo = {"token": "t", "client": VICTIM, "round": 1, "phase": "train"}
    change(own, metrics, echo)
    record = ArrayRecord({name: Array(array) for name, array in own.items()})
    content = RecordDict({"arrays": record, "metrics": MetricRecord(metrics), "echo": ConfigRecord(echo)})
    check_reason(check_update, content, UPDATE, reason)


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


@pytest.mark.parametrize(("loss", "reported"), [
    (0.5, 0.5), (3, 3.0), (1e31, 1e31), (math.inf, math.inf), (-math.inf, -math.inf),
    (10**400, None),  # an integer that no float can hold ended the run
    ([1.0], None), (-1.0, None),
])  # fmt: skip
def test_the_loss_that_a_sound_validation_reports(loss, reported):
    metrics = {"num-examples": 5, "loss": loss, "accuracy": math.nan, "evaluation_seconds": 0.1}
    echo = {"token": "t", "client": VICTIM, "round": 1, "phase": "evaluate"}
    content = RecordDict({"metrics": MetricRecord(metrics), "echo": ConfigRecord(echo)})
    expected = Expected(VICTIM, "t", 1, "evaluate")
    assert reported_loss(content, expected) == reported
    content["echo"]["round"] = 2
    assert reported_loss(content, expected) is None
    assert reported_loss(RecordDict({"echo": ConfigRecord(echo)}), expected) is None


ECHO = {"token": "t", "client": "rot75", "round": 3, "phase": "target"}
READ = partial(read_score, DetailForm({"alpha_mean"}, {"layer1.0"}))
EXPECTED = Expected("rot75", "t", 3, "target", 100)


def target_reply(metrics=None, details=None, extra=None):
    content = score_records(TargetScore(0.5, 1.0, 0.1, [("alpha_mean", "layer1.0", 0.5)]), 100, "accuracy")
    content["metrics"] = MetricRecord({**content["metrics"], **(metrics or {})})
    content["details"] = ConfigRecord({**content["details"], **(details or {})})
    return RecordDict({**content, "echo": ConfigRecord(ECHO), **(extra or {})})


@pytest.mark.parametrize(("change", "reason"), [
    ({"details": {"quantities": [], "names": [], "values": []}}, ""),
    ({"extra": {"evil": ArrayRecord([np.ones(3)])}}, "unexpected array records"),
    ({"extra": {"more": ConfigRecord({"a": 1})}}, "unexpected config records"),
    ({"metrics": {"target_accuracy": 1.0}}, "unexpected metrics"),
    ({"metrics": {"loss": -1e30}}, "loss is"),
    ({"metrics": {"loss": 1.2e36}}, "metric 'loss' is larger than 1e+30 in size: 1.2e"),
    ({"metrics": {"loss": float("nan")}}, "metric 'loss' is not a finite number: nan"),
    ({"metrics": {"accuracy": 2.0}}, "accuracy is"),
    ({"metrics": {"num-examples": 7}}, "the handshake said"),
    ({"extra": {"echo": ConfigRecord({**ECHO, "round": 100})}}, "another message: round"),
    ({"details": {"names": ["=cmd\nround,9"]}}, "not one printable line"),
    ({"details": {"quantities": [b"\xff"]}}, "not one printable line"),
    ({"details": {"values": [float("inf")]}}, "not a finite number"),
    ({"details": {name: ["n"] * 100_000 for name in ("names", "quantities")}}, "rows"),
    ({"details": {"names": []}}, "cannot be checked"),
    ({"details": {"names": "a", "quantities": "a"}}, "three lists"),
])  # fmt: skip
def test_the_target_sites_reply_is_exactly_what_was_asked_for(change, reason):
    score, seconds = checked(READ, target_reply(), EXPECTED)
    assert (score.value, score.details, seconds) == (0.5, [("alpha_mean", "layer1.0", 0.5)], 0.1)
    check_reason(READ, target_reply(**change), EXPECTED, reason)


def multiplied(bank):
    """A record with signs of 1e30, in which the numbers of batches stay."""

    def change(content):
        if bank in content:
            own = record_to_arrays(content[bank]).items()
            new = {n: np.array(a) if n == "batches" else (np.sign(a) * 1e30).astype(a.dtype) for n, a in own}
            content[bank] = state_to_record(new)

    return change


@pytest.mark.parametrize(("method", "phase", "change", "reason"), [
    ("scaffold", "train", multiplied("control"), "control: its record has the norm"),
    ("fediir", "collect", multiplied("classifier_gradient"), "classifier_gradient refused: its record has the norm"),
    ("fednova", "train", lambda content: content["metrics"].update(gradient_count=1e-6), "the aggregated model moves"),
    ("afl", "train", lambda content: content["metrics"].update(received_loss=1e30), "its received_loss is 1e+30"),
    ("fedavg", "evaluate", lambda content: content["metrics"].update({"num-examples": 10**9}),
     "validation refused: it reports 1000000000 examples"),
])  # fmt: skip
def test_one_lie_is_refused_by_name(tmp_path, method, phase, change, reason):
    assert reason in refused_row(tmp_path, change, method, phase, iterations=2)["status"]


@pytest.mark.parametrize(("method", "phase", "bank", "refusal"), [
    ("scaffold", "train", "control", "reply refused"),
    ("fediir", "collect", "classifier_gradient", "classifier_gradient refused"),
])  # fmt: skip
def test_a_bank_that_cannot_measure_a_record_refuses_it_and_the_server_goes_on(
    tmp_path, monkeypatch, method, phase, bank, refusal
):
    """A bank of somebody else may have a bug that a record of a client meets."""

    def compared(self, record):
        if any(float(array.max()) == MARK for array in record.values() if array.size):
            raise ZeroDivisionError("no batches")
        return record

    def marked(content):
        own = record_to_arrays(content[bank])
        content[bank] = state_to_record({n: a if n == "batches" else np.full_like(a, MARK) for n, a in own.items()})

    for each in METHODS[method].banks:
        monkeypatch.setattr(type(each), "compared", compared)
    status = refused_row(tmp_path, marked, method, phase, iterations=2)["status"]
    assert f"{refusal}: it cannot be checked (ZeroDivisionError: no batches)" in status


@pytest.mark.parametrize("value", [-5, 2**63 - 1])
def test_under_secure_mean_counters_are_still_checked(tmp_path, value):
    """Integer tensors are not masked, so that the largest of them would become the model's."""
    counters = arrays(lambda own: {n: np.full_like(a, value) if "num_batches" in n else a for n, a in own.items()})
    row = refused_row(tmp_path, counters, {"name": "fedavg", "fuse": "secure_mean"}, run={"update_limit": 0.0})
    assert "has a negative value, or a count" in row["status"]


def test_more_spectra_than_images_are_refused_before_round_1(tmp_path):
    """All other sites would be sent them. What a site holds is known from the handshake on."""

    def repeated(content):
        own = record_to_arrays(content["amplitude"])["amplitude"]
        content["amplitude"] = state_to_record({"amplitude": np.repeat(own, 50, axis=0)})

    folder, _ = run_small(short(tmp_path, 1, "elcfs"), tamper=tamper(repeated, "collect", (0,)))
    assert "rows, for" in rows_of(folder).loc[(0, VICTIM), "status"]


CLIENTS = ["rot0", "rot15", "rot30"]


def cells(folder, column, round) -> list:
    return list(rows_of(folder).loc[round, column])


def failing(words, phase, rounds):
    def replaced(message: Message, reply: Message) -> Message:
        config = message.content["config"]
        hit = config["phase"] == phase and config["client"] == "rot15" and config["round"] in rounds
        return Message(Error(2, words), reply_to=message) if hit else reply

    return replaced


DRAWN = {"rounds": 5, "iterations": 1, "clients_per_round": 1}


def handed(grid) -> dict[str, set[str]]:
    """The names of the styles that each client got; no client gets them twice."""
    messages = [message.content for message, _ in grid.seen if "style" in message.content.array_records]
    found = {content["config"]["client"]: set(content["style"]) for content in messages}
    assert len(found) == len(messages)
    return found


def test_who_is_drawn_late_gets_the_bank_then(tmp_path):
    _, grid = run_small(small_experiment(tmp_path, "ccst", train=DRAWN))
    trained = {
        message.content["config"]["client"] for message, _ in grid.seen if message.metadata.message_type == "train"
    }
    styles = {f"{name}:{kind}" for name in CLIENTS for kind in ("mean", "std")}
    assert handed(grid) == dict.fromkeys(trained, styles)
    assert len(trained) > 1


def test_a_client_that_fails_does_not_keep_others_from_the_bank_and_gets_it_again(tmp_path):
    tampered = failing("Traceback: out of paint", "collect", (0,))
    with pytest.raises(ClientFailedError, match="out of paint"):
        run_small(small_experiment(tmp_path / "stop", "ccst"), tamper=tampered)
    folder, grid = run_small(short(tmp_path / "on", 1, "ccst"), tamper=tampered)
    assert "out of paint" in cells(folder, "status", 0)[1]
    assert cells(folder, "status", 1) == ["ok"] * 3
    assert {name.split(":")[0] for names in handed(grid).values() for name in names} == {"rot0", "rot30"}
    assert handed(grid)["rot15"]
    folder, _ = run_small(short(tmp_path / "late", 3, "ccst"), tamper=failing("node lost", "train", (2,)))
    assert cells(folder, "bytes_down_style", 3)[1] == 24
    assert np.isnan([*cells(folder, "bytes_down_style", 2)[::2], *cells(folder, "bytes_down_style", 3)[::2]]).all()


SMALL = {"name": "fedccrl", "aligned_views": {"width": 1}}


def means_of(record):
    return record_to_arrays(record).get("mean", np.zeros((0, 1), np.float32))


def test_rows_anew_in_every_round_and_those_of_a_client_that_fails_stay(tmp_path):
    """In round 2 the rows of rot15 are lost: it does not train, and the others get its rows of round 1."""
    failing = tamper(lambda content: content["pixel_stats"].clear(), "collect")
    anew = {**SMALL, "pixel_statistics": {"refresh": "round"}}
    _, grid = run_small(short(tmp_path, 2, anew), tamper=failing)
    found, handed = {}, {}
    for message, reply in grid.seen:
        config, kind = message.content["config"], message.metadata.message_type
        if kind == "query.collect":
            assert "arrays" not in message.content.array_records
            found[config["round"], config["client"]] = means_of(reply.content["pixel_stats"])
        elif kind == "train":
            handed[config["round"], config["client"]] = means_of(message.content["pixel_stats"])
    assert not any(np.array_equal(found[1, client], found[2, client]) for client in ("rot0", "rot30"))
    assert len(found[1, "rot15"]) == 8
    assert handed.keys() == found.keys() - {(2, "rot15")}
    assert np.array_equal(handed[1, "rot15"], np.concatenate([found[1, "rot0"], found[1, "rot30"]]))
    assert np.array_equal(handed[2, "rot0"], np.concatenate([found[1, "rot15"], found[2, "rot30"]]))
