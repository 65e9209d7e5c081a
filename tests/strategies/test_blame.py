"""Which client is blamed for what, and in which order, where several faults meet in one round or in one reply."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Error, Message
from safetensors.numpy import load_file
from support import run_small, small_experiment
from tampering import EVERYBODY, arrays, floats, rows_of, short

from fedsim.common.errors import ClientFailedError
from fedsim.tensors.arrays import state_to_record
from strategies import compute
from strategies.accept import HISTORY
from strategies.parts import LostRoundError, RefusedUpdateError, Update
from strategies.state import ServerState
from strategies.wire.round_notes import RoundNotes

A, B, C = "rot0", "rot15", "rot30"


def nan(own):
    own["head.weight"][0, 0] = np.nan


def metric(**values):
    return lambda content: content["metrics"].update(values)


def echo(content):
    content["echo"]["round"] = 99


def extra_record(content):
    content["surprise"] = state_to_record({"x": np.zeros(1)})


def without(name):
    return lambda content: content["metrics"].pop(name)


def wrong_shape(own):
    own["head.bias"] = own["head.bias"][:-1]


def negative(own):
    (name, *_) = [name for name in own if name.endswith("running_var")]
    own[name] -= 10


def missing_tensor(own):
    del own["head.bias"]


# The checks of one reply, in their order: where a reply has two faults, the earlier one is its reason.
CHECKS = {
    "records": (extra_record, "unexpected array records ['surprise']"),
    "echo": (echo, "it answers another message: round is 99, expected 2"),
    "metrics": (metric(extra=math.nan), "metric 'extra' is not a finite number"),
    "examples": (metric(**{"num-examples": 0}), "num-examples is 0, not a positive integer"),
    "needed": (without("train_loss"), "missing metrics ['train_loss']"),
    "names": (metric(weight=1.0), "a metric may not be called 'weight'"),
    "ranges": (metric(train_seconds=-1.0), "train_seconds is -1.0, and may not be negative"),
    "tensors": (arrays(missing_tensor), "missing tensors ['head.bias']"),
    "shapes": (arrays(wrong_shape), "tensor 'head.bias' is"),
    "finite": (arrays(nan), "tensor 'head.weight' of record 'arrays' has NaN or infinite values"),
    "nonnegative": (arrays(negative), "has a negative value, or a count that is too large"),
}


def changed(faults, phase="train", rounds=(2,)):
    """A tamper that applies each client's faults to its reply in these rounds; an Error replaces the reply."""

    def tamper(message, reply):
        config = message.content["config"]
        if config["phase"] == phase and config["round"] in rounds:
            for fault in faults.get(config["client"], ()):
                if isinstance(fault, Error):
                    return Message(fault, reply_to=message)
                fault(reply.content)
        return reply

    return tamper


def statuses(folder, round=2):
    return rows_of(folder).loc[round, "status"].to_dict()


PAIRS = list(zip(CHECKS, list(CHECKS)[1:]))


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_the_earlier_check_of_a_reply_is_its_reason(first, second, tmp_path):
    faults = {B: (CHECKS[second][0], CHECKS[first][0])}
    folder, _ = run_small(short(tmp_path), tamper=changed(faults))
    assert CHECKS[first][1] in statuses(folder)[B]
    assert [statuses(folder)[name] for name in (A, C)] == ["ok", "ok"]


def test_failures_are_recorded_in_the_order_of_the_domains_and_not_of_arrival(tmp_path, caplog):
    """Errors, refused replies and refused updates: first what the replies themselves say, then what they are besides
    each other."""
    faults = {C: (Error(2, "ValueError: disk"),), A: (CHECKS["finite"][0],), B: (floats(lambda array: array * 1e30),)}
    run_small(short(tmp_path), tamper=changed(faults))
    said = [record.message for record in caplog.records if record.message.startswith("round 2")]
    assert [text.split(":")[1].strip() for text in said] == [
        "client 'rot0'", "client 'rot30'", "client 'rot15'", "no reply was accepted; the model stays as it was"
    ]  # fmt: skip
    assert "reply refused: tensor 'head.weight'" in said[0]
    assert "error 2: ValueError: disk" in said[1]
    assert "times the model's norm" in said[2] or "times the median of its own" in said[2]


@pytest.mark.parametrize(("faults", "blamed"), [
    ({C: (Error(2, "ValueError: disk"),), A: (CHECKS["finite"][0],)}, "client 'rot0' failed in round 2: reply refused"),
    ({C: (floats(lambda array: array * 1e30),), B: (Error(2, "ValueError: disk"),)},
     "client 'rot15' failed in round 2: error 2"),
    ({C: (floats(lambda array: array * 1e30),)}, "client 'rot30' failed in round 2: reply refused: its update"),
])  # fmt: skip
def test_with_stop_the_first_of_them_ends_the_run(faults, blamed, tmp_path):
    with pytest.raises(ClientFailedError, match=blamed):
        run_small(short(tmp_path, run={}), tamper=changed(faults))


def test_a_bank_s_refusal_comes_before_the_limit_of_updates(tmp_path, caplog):
    """SCAFFOLD's control variates come with the replies: one of another shape, one far too large, one large update."""

    def other_shape(content):
        content["controls"] = state_to_record({"x": np.zeros(3, np.float32)})

    def find_bank(message, reply):
        if message.content["config"]["phase"] == "train" and message.content["config"]["round"] == 2:
            banks.update({name for name in reply.content.array_records if name != "arrays"})
        return reply

    banks: set[str] = set()
    run_small(short(tmp_path / "look", method="scaffold"), tamper=find_bank)
    (bank,) = banks

    def huge(content):
        own = {name: array.numpy() * np.float32(1e20) + np.float32(1e20) for name, array in content[bank].items()}
        content[bank] = state_to_record(own)

    faults = {A: (floats(lambda array: array * 1e10),), B: (huge,)}
    run_small(short(tmp_path / "faults", method="scaffold"), tamper=changed(faults))
    said = [record.message for record in caplog.records if record.message.startswith("round 2")]
    assert [text.split(":")[1].strip() for text in said] == [
        "client 'rot15'", "client 'rot0'", "client 'rot30'", "no reply was accepted; the model stays as it was"
    ]  # fmt: skip  # of two clients, either may be the wrong one
    assert f"reply refused: {bank}: " in said[0]
    assert "its update has the norm" in said[1]


HUGE = floats(lambda array: np.full_like(array, 3e38))


@pytest.mark.parametrize(("faults", "expected"), [
    ({B: (HUGE,)}, {A: "ok", B: "reply refused: with it, the outputs of the aggregated model are not finite", C: "ok"}),
    ({B: (HUGE,), A: (CHECKS["echo"][0],)}, {A: "reply refused: it answers", B: "reply refused: with it, ", C: "ok"}),
])  # fmt: skip
def test_without_a_limit_the_client_that_ruins_the_model_is_found(faults, expected, tmp_path):
    run = {"on_client_failure": "continue", "update_limit": 0}
    folder, _ = run_small(short(tmp_path, run=run), tamper=changed(faults))
    found = statuses(folder)
    assert all(found[client].startswith(start) for client, start in expected.items()), found


@pytest.mark.parametrize("error", [LostRoundError("three updates are needed"), RefusedUpdateError(A, "it is alone")])
def test_where_no_client_can_be_left_out_none_is_blamed(error, monkeypatch, tmp_path):
    """The search for the client that ruins the model leaves each out, and a part may not work without it."""
    fuse = compute.weigh_and_fuse

    def needs_three(parts, updates, view):
        if len(updates) < 3:
            raise error
        return fuse(parts, updates, view)

    monkeypatch.setattr(compute, "weigh_and_fuse", needs_three)
    run = {"on_client_failure": "continue", "update_limit": 0}
    folder, _ = run_small(short(tmp_path, run=run), tamper=changed({B: (HUGE,)}))
    reason = "not used: the outputs of the aggregated model are not finite"
    assert statuses(folder) == dict.fromkeys((A, B, C), reason)


def test_a_round_that_is_taken_back_teaches_no_layout():
    """Otherwise a broken client that was alone in a lost round would have all others refused later."""
    state = ServerState(layouts={"controls": "float32 (3,)"})
    before = state.snapshot()
    state.layouts["styles"] = "float32 (9,)"
    for _ in range(2):
        state.restore(before)
        assert state.layouts == {"controls": "float32 (3,)"}
        state.layouts["controls"] = "float32 (1,)"


def test_who_fails_after_its_training_is_not_noted_as_keeping_a_bank():
    """Its update counts, but it did not answer a collection after it, and may have been restarted."""
    notes, state, kept = RoundNotes(2), ServerState(), []
    notes.row(A)
    notes.fail(B, "node lost")
    parts = SimpleNamespace(keep=kept.extend)
    server = SimpleNamespace(state=state, exchange=SimpleNamespace(notes=notes), parts=parts)
    compute.keep(server, SimpleNamespace(banks={}), [Update(A, 3, {}), Update(B, 3, {})], {A: 1.0, B: 2.0})
    assert kept == [A]
    history, _ = state.of_part(HISTORY)
    assert set(history) == {A, B}


LOSS_NAN, LOSS_INFINITE = metric(loss=math.nan), metric(loss=math.inf)
LOSS_LIST = metric(loss=[1.0])  # no number at all


@pytest.mark.parametrize(("faults", "expected"), [
    ({A: (LOSS_NAN,)}, {A: "validation refused: metric 'loss' is not a finite number", B: "ok", C: "ok"}),
    ({A: (LOSS_NAN,), C: (LOSS_NAN,)}, dict.fromkeys(EVERYBODY, "not used: the model's loss is not finite at 2 of 3")),
    ({A: (LOSS_NAN,), C: (Error(2, "ValueError: disk"),)},
     {A: "validation refused: metric 'loss'", B: "ok", C: "error 2: ValueError: disk"}),
    ({A: (LOSS_NAN,), C: (LOSS_NAN,), B: (Error(3, "gone"),)}, {A: "not used", B: "not used", C: "not used"}),
    # what a client says of the model counts only in a reply without another fault
    ({A: (LOSS_NAN, echo), C: (LOSS_NAN, echo)},
     {A: "validation refused: it answers another", B: "ok", C: "validation refused: it answers another"}),
    ({A: (LOSS_NAN, echo), C: (LOSS_NAN,)},
     {A: "validation refused: it answers another", B: "ok", C: "validation refused: metric 'loss' is not a finite"}),
    ({A: (LOSS_LIST,), C: (LOSS_LIST,)},
     {A: "validation refused: metric 'loss' is not a finite", B: "ok", C: "validation refused: metric 'loss'"}),
    ({A: (LOSS_NAN, without("accuracy")), C: (LOSS_NAN, extra_record)},
     {A: "validation refused: metric 'loss'", B: "ok", C: "validation refused: missing array records [], unexpected"}),
    # the other numbers of a model that is not finite may be as bad
    ({A: (metric(loss=math.nan, accuracy=math.nan),), C: (LOSS_INFINITE,)},
     dict.fromkeys(EVERYBODY, "not used: the model's loss is not finite at 2 of 3")),
    ({A: (metric(accuracy=2.0),), B: (metric(**{"num-examples": 10**8}),)},
     {A: "validation refused: accuracy is 2.0", B: "validation refused: it reports 100000000 examples", C: "ok"}),
])  # fmt: skip
def test_who_is_blamed_after_a_validation(faults, expected, tmp_path):
    folder, _ = run_small(short(tmp_path), tamper=changed(faults, "evaluate"))
    found = statuses(folder)
    assert all(found[client].startswith(start) for client, start in expected.items()), found


def test_an_update_that_stands_out_is_blamed_for_a_useless_model_and_its_bank_is_forgotten(tmp_path):
    """The round is taken back: the model, the banks and what the clients keep are those of the round before."""

    def tamper(message, reply):
        large = changed({B: (floats(lambda array: array * 30),)})
        return changed(dict.fromkeys(EVERYBODY, (LOSS_NAN,)), "evaluate")(message, large(message, reply))

    run = {"on_client_failure": "continue", "update_limit": 0}
    first, _ = run_small(short(tmp_path / "first", 1, "scaffold", run))
    folder, _ = run_small(short(tmp_path / "both", 2, "scaffold", run), tamper=tamper)
    np.testing.assert_equal(*(load_file(each / "last.safetensors") for each in (folder, first)))
    found = statuses(folder)
    assert found[B].startswith("reply refused: the model's loss is not finite at 3 of 3 sites; its update has")
    assert found[A].startswith("not used: the model was taken back because of 'rot15'")


@pytest.mark.parametrize("fault", [echo, extra_record, LOSS_LIST])
def test_a_malformed_validation_of_the_only_client_takes_no_round_back(fault, tmp_path):
    """The reply is refused, and the model of the round stays: the client has said nothing about it."""
    train = {"rounds": 2, "iterations": 1, "clients_per_round": 1, "evaluate_clients": "drawn"}
    experiment = small_experiment(tmp_path, train=train, run={"on_client_failure": "continue"})
    folder, _ = run_small(experiment, tamper=changed(dict.fromkeys(EVERYBODY, (LOSS_NAN, fault)), "evaluate"))
    (client,) = [name for name, weight in rows_of(folder).loc[2, "weight"].items() if weight > 0]
    assert statuses(folder)[client].startswith("validation refused")
