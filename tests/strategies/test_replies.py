"""Replies that must not touch the global model: each is refused by name with its reason, and recorded."""

import dataclasses

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from safetensors.numpy import load_file
from support import SpyGrid, numbers, run_small, small_experiment

from clients.base import DomainClient
from fedsim.common.errors import ClientFailedError, UserError
from fedsim.run.plan import resolve, run_folder
from fedsim.run.serve import serve
from fedsim.tensors.arrays import record_to_arrays
from strategies.stored import heads_of
from strategies.wire.reply_checks import Expected, RejectedReplyError, check_update, judged

VICTIM = "rot15"
SHORT = {"rounds": 2, "iterations": 1}


def changed(content, change):
    """A reply's content, changed by `change(arrays, metrics, echo)`."""
    arrays = {name: np.array(array) for name, array in record_to_arrays(content.array_records["arrays"]).items()}
    metrics, echo = dict(content.metric_records["metrics"]), dict(content.config_records["echo"])
    change(arrays, metrics, echo)
    record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    return RecordDict({"arrays": record, "metrics": MetricRecord(metrics), "echo": ConfigRecord(echo)})


def reply_with(message, reply, change):
    return Message(changed(reply.content, change), reply_to=message)


def tamper_with(change, rounds=(2,), victims=(VICTIM,)):
    """Changes the victims' training replies in the given rounds."""

    def tamper(message, reply):
        config = message.content.config_records["config"]
        hit = (message.metadata.message_type, config["client"] in victims, config["round"] in rounds)
        return reply_with(message, reply, change) if hit == ("train", True, True) else reply

    return tamper


def set_nan(arrays, metrics, echo):
    arrays["head.weight"][0, 0] = np.nan


@pytest.fixture(scope="module")
def genuine(tmp_path_factory):
    """(content, what was expected) of a real training reply."""
    _, grid = run_small(small_experiment(tmp_path_factory.mktemp("genuine"), train={**SHORT, "rounds": 1}))
    (content,) = [
        reply.content
        for message, reply in grid.seen
        if message.metadata.message_type == "train" and message.content.config_records["config"]["client"] == VICTIM
    ]
    echo = content.config_records["echo"]
    expected = Expected(VICTIM, echo["token"], 1, "train", content.metric_records["metrics"]["num-examples"])
    arrays = record_to_arrays(content.array_records["arrays"])
    return content, dataclasses.replace(expected, shapes=heads_of(arrays))


@pytest.mark.parametrize(("change", "reason"), [
    (lambda a, m, e: None, ""),
    (set_nan, "NaN or infinite"),
    (lambda a, m, e: a["head.bias"].fill(np.inf), "NaN or infinite"),
    (lambda a, m, e: a.pop("head.bias"), "missing tensors ['head.bias']"),
    (lambda a, m, e: a.update(extra=np.zeros(3, np.float32)), "unexpected tensors ['extra']"),
    (lambda a, m, e: a.update({"head.weight": a["head.weight"].T.copy()}), "'head.weight' is"),
    (lambda a, m, e: a.update({"head.weight": a["head.weight"].astype(np.float64)}), "float64"),
    (lambda a, m, e: m.update({"num-examples": 10**12}), "the handshake said"),
    (lambda a, m, e: m.update({"num-examples": 79}), "the handshake said 80"),
    (lambda a, m, e: m.update({"num-examples": 0}), "not a positive integer"),
    (lambda a, m, e: m.update({"num-examples": 80.5}), "not a positive integer"),
    (lambda a, m, e: m.update(train_loss=float("nan")), "not a finite number"),
    (lambda a, m, e: e.update(round=2), "another message: round"),
    (lambda a, m, e: e.update(client="rot0"), "another message: client"),
    (lambda a, m, e: e.update(token="0" * 16), "another message: token"),
])  # fmt: skip
def test_what_is_wrong_with_a_reply(genuine, change, reason):
    content, expected = genuine
    found = ""
    try:
        judged(check_update, changed(content, change), expected)
    except RejectedReplyError as error:
        found = str(error)
    assert reason in found
    assert bool(found) == bool(reason)


def test_bad_reply_stops_the_run_by_name(tmp_path):
    """By default the run stops and names client and reason, because a lost client is a lost domain."""
    with pytest.raises(ClientFailedError, match=f"client '{VICTIM}' failed in round 2: reply refused: .*NaN"):
        run_small(small_experiment(tmp_path, train=SHORT), tamper=tamper_with(set_nan))


def test_bad_reply_is_left_out_when_asked(tmp_path):
    """With `continue` the model of the round equals that of a federation without the client."""
    experiment = small_experiment(tmp_path / "bad", train=SHORT, run={"on_client_failure": "continue"})
    folder, _ = run_small(experiment, tamper=tamper_with(set_nan, rounds=(1, 2)))
    clients = numbers(folder / "clients.csv")
    bad = clients[clients["client"] == VICTIM]
    assert bad["weight"].isna().all()
    assert bad["status"].str.contains("reply refused").all()
    assert (numbers(folder / "rounds.csv")["failed"].iloc[1:] == 1).all()
    reduced = small_experiment(tmp_path / "reduced", train=SHORT, data={"domains": ["rot0", "rot30", "rot45"]})
    model, expected = (load_file(each / "last.safetensors") for each in (folder, run_small(reduced)[0]))
    for name, array in expected.items():
        np.testing.assert_array_equal(model[name], array)


def test_all_replies_bad_leaves_the_model_unchanged(tmp_path):
    """An empty round keeps theta^(t-1) and is recorded; a run of empty rounds fails."""
    experiment = small_experiment(tmp_path, run={"on_client_failure": "continue"}, train=SHORT)
    with pytest.raises(ClientFailedError, match="no round was made: no client's reply was accepted in 2 rounds"):
        run_small(experiment, tamper=tamper_with(set_nan, (1, 2), ("rot0", VICTIM, "rot30")))
    rounds = numbers(run_folder(experiment) / "rounds.csv")
    assert list(rounds["round"]) == [0, 1, 2]
    assert (rounds["clients"] == 0).all()
    assert rounds["target_accuracy"].nunique() == 1


def test_replies_are_matched_to_their_messages(tmp_path):
    """The order of arrival changes nothing, because sums are computed in the order of the domains."""

    class Shuffled(SpyGrid):
        def pull_messages(self, message_ids):
            return list(reversed(super().pull_messages(message_ids)))

    plain, _ = run_small(small_experiment(tmp_path / "plain", train=SHORT))
    shuffled = serve(Shuffled(3), resolve(small_experiment(tmp_path / "shuffled", train=SHORT)))
    assert numbers(plain / "rounds.csv").equals(numbers(shuffled / "rounds.csv"))


@pytest.mark.parametrize(("error", "kind", "words", "lines"), [
    (ZeroDivisionError("no such luck"), ClientFailedError,
     r"client 'rot0' failed in round 1[^$]*in broken[^$]*ZeroDivisionError: no such luck", True),
    (UserError("the folder is empty"), UserError, "^client rot0: the folder is empty$", False),
])  # fmt: skip
def test_a_clients_own_error_is_shown(tmp_path, monkeypatch, error, kind, words, lines):
    """With its traceback, and the domain's name; an error that its user can correct is one line."""

    def broken(self, round):
        raise error

    monkeypatch.setattr(DomainClient, "_train", broken)
    with pytest.raises(kind, match=words) as found:
        run_small(small_experiment(tmp_path))
    assert ("\n" in str(found.value)) == lines
