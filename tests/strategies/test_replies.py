"""Replies that must not touch the global model: each is refused by name with its reason, and recorded."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from safetensors.numpy import load_file
from support import numbers, run_small, small_experiment

from fedsim.common.errors import ClientFailedError, UserError
from fedsim.run.plan import run_folder
from fedsim.tensors.arrays import record_to_arrays

VICTIM = "rot15"


def reply_with(message, reply, change):
    """The reply with its content changed by `change(arrays, metrics, echo, records)`."""
    arrays = {name: np.array(array) for name, array in record_to_arrays(reply.content.array_records["arrays"]).items()}
    metrics, echo = dict(reply.content.metric_records["metrics"]), dict(reply.content.config_records["echo"])
    change(arrays, metrics, echo)
    record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    content = RecordDict({"arrays": record, "metrics": MetricRecord(metrics), "echo": ConfigRecord(echo)})
    return Message(content, reply_to=message)


def tamper_with(change, rounds=(2,)):
    """Changes the victim's training reply in the given rounds."""

    def tamper(message, reply):
        config = message.content.config_records["config"]
        hit = message.metadata.message_type == "train" and config["client"] == VICTIM and config["round"] in rounds
        return reply_with(message, reply, change) if hit else reply

    return tamper


def set_nan(arrays, metrics, echo):
    arrays["head.weight"][0, 0] = np.nan


def set_infinite_bias(arrays, metrics, echo):
    arrays["head.bias"][-1] = np.inf


def drop_key(arrays, metrics, echo):
    del arrays["head.bias"]


def add_key(arrays, metrics, echo):
    arrays["extra"] = np.zeros(3, np.float32)


def wrong_shape(arrays, metrics, echo):
    arrays["head.weight"] = arrays["head.weight"].T.copy()


def wrong_dtype(arrays, metrics, echo):
    arrays["head.weight"] = arrays["head.weight"].astype(np.float64)


def huge_count(arrays, metrics, echo):
    metrics["num-examples"] = 10**12


def negative_count(arrays, metrics, echo):
    metrics["num-examples"] = -5


def fractional_count(arrays, metrics, echo):
    metrics["num-examples"] = 80.5


def nan_loss(arrays, metrics, echo):
    metrics["train_loss"] = float("nan")


def other_round(arrays, metrics, echo):
    echo["round"] = 1


def other_client(arrays, metrics, echo):
    echo["client"] = "rot0"


def other_run(arrays, metrics, echo):
    echo["token"] = "0" * 16


CHANGES = {
    set_nan: "NaN or infinite",
    set_infinite_bias: "NaN or infinite",
    drop_key: "missing tensors ['head.bias']",
    add_key: "unexpected tensors ['extra']",
    wrong_shape: "'head.weight' is",
    wrong_dtype: "float64",
    huge_count: "the handshake said",
    negative_count: "not a positive integer",
    fractional_count: "not a positive integer",
    nan_loss: "not a finite number",
    other_round: "another message: round",
    other_client: "another message: client",
    other_run: "another message: token",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_bad_reply_stops_the_run_by_name(change, tmp_path):
    """By default the run stops and names client and reason, because a lost client is a lost domain."""
    with pytest.raises(ClientFailedError, match=f"client '{VICTIM}' failed in round 2: reply refused") as error:
        run_small(small_experiment(tmp_path), tamper=tamper_with(change))
    assert CHANGES[change] in str(error.value)


@pytest.mark.parametrize("change", [set_nan, wrong_shape, huge_count], ids=lambda change: change.__name__)
def test_bad_reply_is_left_out_when_asked(change, tmp_path):
    """With `continue` the model of the round equals that of a federation without the client."""
    experiment = small_experiment(tmp_path / "bad", run={"on_client_failure": "continue"})
    folder, _ = run_small(experiment, tamper=tamper_with(change, rounds=(1, 2, 3)))
    clients = numbers(folder / "clients.csv")
    bad = clients[clients["client"] == VICTIM]
    assert bad["weight"].isna().all()
    assert bad["status"].str.contains("reply refused").all()
    assert (numbers(folder / "rounds.csv")["failed"].iloc[1:] == 1).all()
    reduced = small_experiment(tmp_path / "reduced", data={"domains": ["rot0", "rot30", "rot45"]})
    other, _ = run_small(reduced)
    model, expected = load_file(folder / "last.safetensors"), load_file(other / "last.safetensors")
    for name, array in expected.items():
        np.testing.assert_array_equal(model[name], array)


def test_all_replies_bad_leaves_the_model_unchanged(tmp_path):
    """An empty round keeps theta^(t-1) and is recorded; a run of empty rounds fails."""

    def break_all(message, reply):
        return reply_with(message, reply, set_nan) if message.metadata.message_type == "train" else reply

    experiment = small_experiment(tmp_path, run={"on_client_failure": "continue"}, train={"rounds": 2})
    with pytest.raises(ClientFailedError, match="no round was made: no client's reply was accepted in 2 rounds"):
        run_small(experiment, tamper=break_all)
    rounds = numbers(run_folder(experiment) / "rounds.csv")
    assert list(rounds["round"]) == [0, 1, 2]
    assert (rounds["clients"] == 0).all()
    assert rounds["target_accuracy"].nunique() == 1


def test_replies_are_matched_to_their_messages(tmp_path):
    """The order of arrival changes nothing, because sums are computed in the order of the domains."""
    from support import SpyGrid

    class Shuffled(SpyGrid):
        def pull_messages(self, message_ids):
            return list(reversed(super().pull_messages(message_ids)))

    from fedsim.run.plan import resolve
    from fedsim.server_app import serve

    plain, _ = run_small(small_experiment(tmp_path / "plain"))
    shuffled = serve(Shuffled(3), resolve(small_experiment(tmp_path / "shuffled")))
    assert numbers(plain / "rounds.csv").equals(numbers(shuffled / "rounds.csv"))


def test_client_exception_carries_its_traceback(tmp_path, monkeypatch):
    """The operator sees a failing client's own traceback, with the domain's name."""
    from clients.base import DomainClient

    def broken(self, round):
        raise ZeroDivisionError("no such luck")

    monkeypatch.setattr(DomainClient, "_train", broken)
    with pytest.raises(ClientFailedError, match=r"client 'rot0' failed in round 1") as error:
        run_small(small_experiment(tmp_path))
    assert "in broken" in str(error.value)
    assert "ZeroDivisionError: no such luck" in str(error.value)


def test_client_user_error_is_one_line(tmp_path, monkeypatch):
    """An error that a client's user can correct arrives as a UserError without a traceback."""
    from clients.base import DomainClient

    def refuse(self, round):
        raise UserError("the folder is empty")

    monkeypatch.setattr(DomainClient, "_train", refuse)
    with pytest.raises(UserError, match="client rot0: the folder is empty") as error:
        run_small(small_experiment(tmp_path))
    assert "\n" not in str(error.value)
