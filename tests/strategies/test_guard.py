"""One reply cannot destroy the model: limits for updates, a check of the fused model, and the return to an old one."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Message, RecordDict
from safetensors.numpy import load_file
from support import numbers, run_small, small_experiment

from fedsim.common.errors import ClientFailedError
from fedsim.tensors.arrays import record_to_arrays, state_to_record
from strategies.wire.fused_check import model_probe, suspect
from strategies.wire.guard import Guard
from strategies.wire.membership import implausible
from strategies.wire.reply_checks import RejectedReplyError, check_nonnegative
from strategies.wire.update_limit import lower_median, over_limit, update_size

VICTIM = "rot15"


def test_the_size_of_an_update():
    """sqrt((3-1)^2 + (1-2)^2 + 2^2) = 3; counters are ignored, and 3e38 causes no overflow."""
    before = {"w": np.array([1.0, 2.0], np.float32), "v": np.array([0.0]), "n": np.array(5)}
    after = {"w": np.array([3.0, 1.0], np.float32), "v": np.array([2.0]), "n": np.array(900)}
    assert update_size(after, before) == pytest.approx(3.0)
    huge = {"w": np.full(4, 3e38, np.float32)}
    assert update_size(huge, {"w": np.zeros(4, np.float32)}) == pytest.approx(6e38)
    assert update_size(huge, {"w": np.full(4, -3e38, np.float32)}) == pytest.approx(12e38)  # no float32 number
    assert update_size({"w": np.array([np.inf], np.float32)}, {"w": np.zeros(1, np.float32)}) == math.inf
    one = np.random.default_rng(0).standard_normal((2, 50_000)).astype(np.float32)
    exact = np.linalg.norm(one[0].astype(np.float64) - one[1].astype(np.float64))
    assert update_size({"w": one[0]}, {"w": one[1]}) == pytest.approx(exact, rel=1e-8)
    mixed = {"h": np.array([2.0], np.float16), "d": np.array([1e100]), "f": np.array([1.0], np.float32)}
    assert update_size(mixed, {"h": np.array([0.0], np.float16), "d": np.array([0.0]), "f": np.array([5.0])}) == 1e100


def test_the_lower_median():
    """For an even number of values it is the smaller of the two in the middle."""
    found = [lower_median(values) for values in ([], [3.0], [1.0, 9.0], [9.0, 1.0, 4.0], [4, 1, 9, 2])]
    assert found == [0, 3, 1, 4, 2]


@pytest.mark.parametrize(
    ("sizes", "refused"),
    [
        ({"a": 1.0, "b": 2.0, "c": 200.0}, set()),  # 100 times the upper median of (1, 2)
        ({"a": 1.0, "b": 2.0, "c": 201.0}, {"c"}),
        ({"a": 1e-4, "b": 1.0, "c": 1.1}, set()),  # one of three that hardly moves has no honest one refused
        ({"a": 1e-4, "b": 1e-4, "c": 1.0, "d": 1.1, "e": 0.9}, set()),  # nor do two of five
        ({"a": 3e38, "b": 3e38, "c": 1.0, "d": 1.1, "e": 0.9}, {"a", "b"}),
        ({"a": 1.0, "b": 3e38, "c": 3e38}, set()),  # two of three that lie together; the fused model is checked
        ({"a": 1e-4, "b": 1e-4, "c": 1.0}, {"c"}),  # and they have the third refused
        ({"a": 1.0, "b": float("inf")}, {"b"}),
        ({"a": 0.0, "b": 5.0}, set()),  # nothing to compare with
        ({"a": 0.0, "b": 5.0, "c": 6.0}, set()),
    ],
)
def test_who_is_over_the_limit(sizes, refused):
    assert over_limit(sizes, {}, 1.0, 100.0).keys() == refused
    assert over_limit(sizes, {}, 1.0, 0.0) == {}


def test_of_two_clients_either_may_be_wrong():
    assert "of two clients, either may be the wrong one" in over_limit({"a": 1e-4, "b": 1.0}, {}, 1.0, 100.0)["b"]
    assert "of two clients" not in over_limit({"a": 1.0, "b": 1.0, "c": 1e9}, {}, 1.0, 100.0)["c"]


def test_who_stands_out():
    assert suspect({"a": 1e-4, "b": 1.0, "c": 1.1}) == ("c", pytest.approx(1.1))
    assert suspect({"a": 1.0, "b": 1.0, "c": 30.0}) == ("c", 30.0)
    assert suspect({"a": 1.0}) == ("a", math.inf)


@pytest.mark.parametrize(
    ("counts", "refused"),
    [
        ({"a": 1000, "b": 1100, "c": 9}, set()),
        ({"a": 1000, "b": 1100, "c": 900, "d": 1, "e": 1}, set()),
        ({"a": 1000, "b": 1100, "c": 10**9}, {"c"}),
        ({"a": 1000, "b": 9}, {"a"}),
    ],
)
def test_whose_number_of_examples_is_implausible(counts, refused):
    """One site of three that claims 9 examples has no honest one refused; of two, either may be the wrong one."""
    reasons = implausible(counts, 100.0)
    assert reasons.keys() == refused
    assert all(("of two clients" in reason) == (len(counts) == 2) for reason in reasons.values())


def test_alone_a_client_is_held_against_itself():
    """It is compared with its own earlier rounds, and before these with the model."""
    own = {"a": [3.0, 2.0, 4.0]}
    found = over_limit({"a": 301.0}, own, 1.0, 100.0)["a"]
    assert found.startswith("its update has the norm 301, 100 times the median of its own")
    assert not over_limit({"a": 300.0}, own, 1.0, 100.0)
    assert over_limit({"a": 201.0}, {}, 2.0, 100.0)


@pytest.mark.parametrize(("useless", "asked", "said"), [
    (1, 2, ""), (1, 3, ""), (2, 3, "2 of 3 sites; its update has 30 times"), (2, 2, "2 of 2 sites; its update"),
])  # fmt: skip
def test_a_model_is_useless_when_more_than_half_of_the_sites_say_so(useless, asked, said):
    guard = Guard(100.0)
    guard.sizes, guard._useless = {"a": 1.0, "b": 1.0, "c": 30.0}, useless
    client, reason = guard.useless(asked)
    assert said in reason
    assert (client, bool(reason)) == (("c", True) if said else ("", False))


def test_the_probe_sees_what_overflows():
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)).train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    probe = model_probe(net, 1, 2)
    sound = {name: value.numpy().copy() for name, value in before.items()}
    assert probe(sound)
    assert not probe({**sound, "1.weight": np.full((3, 4), 3e38, np.float32)})
    assert net.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def tamper(change, victims=(VICTIM,)):
    """Changes the victims' arrays in round 2."""

    def tampered(message, reply):
        config = message.content.config_records["config"]
        if config["client"] not in victims or (message.metadata.message_type, config["round"]) != ("train", 2):
            return reply
        arrays = {name: np.array(array) for name, array in record_to_arrays(reply.content["arrays"]).items()}
        return Message(RecordDict({**reply.content, "arrays": state_to_record(change(arrays))}), reply_to=message)

    return tampered


def everywhere(value):
    return lambda arrays: {n: np.full_like(a, value) if a.dtype.kind == "f" else a for n, a in arrays.items()}


CONTINUE = {"on_client_failure": "continue"}
SHORT = {"rounds": 3, "iterations": 1}


def by_client(folder):
    """clients.csv by round and client."""
    return pd.read_csv(folder / "clients.csv").set_index(["round", "client"])


def test_with_stop_the_offender_is_named(tmp_path):
    """An honest site that validates the damaged model is not named; the run can resume after the last good round."""
    experiment = small_experiment(tmp_path, train=SHORT)
    with pytest.raises(
        ClientFailedError, match=r"client 'rot15' failed in round 2: reply refused: its update has the norm"
    ):
        run_small(experiment, tamper=tamper(everywhere(3e38)))
    folder, _ = run_small(experiment)
    assert by_client(folder)["status"].eq("ok").all()


def test_without_a_limit_the_fused_model_is_checked(tmp_path):
    """3e38 passes every check of one reply; the fused model is not sent, and the wrong reply is found."""
    found = {}
    for limit, said in ((0, "without it the model is usable"), (100, "times the median of the other replies")):
        experiment = small_experiment(tmp_path / str(limit), train=SHORT, run={**CONTINUE, "update_limit": limit})
        folder, _ = run_small(experiment, tamper=tamper(everywhere(3e38)))
        assert said in by_client(folder).loc[(2, VICTIM), "status"]
        assert by_client(folder).loc[3, "status"].eq("ok").all()
        found[limit] = numbers(folder / "rounds.csv")
    pd.testing.assert_frame_equal(*found.values())


@pytest.mark.parametrize(("values", "fine"), [([1.0, 0.0, 0.2], True), ([0.0, 0.0, 1.0], False), ([1.0, -0.1], False)])
def test_variances_are_not_negative_and_not_mostly_zero(values, fine):
    """Zero variances multiply values by 300 in every layer; a single channel may have variance zero."""
    arrays = {"running_var": np.array(values, np.float32), "count": np.array(0)}
    if fine:
        check_nonnegative(arrays, ["running_var", "count"])
    else:
        with pytest.raises(RejectedReplyError, match="running_var"):
            check_nonnegative(arrays, ["running_var", "count"])


def nan_validation(rounds, clients=("rot0", VICTIM, "rot30")):
    """The validation loss of these clients is NaN."""

    def tampered(message, reply):
        config = message.content.config_records["config"]
        if message.metadata.message_type == "evaluate" and config["round"] in rounds and config["client"] in clients:
            reply.content["metrics"]["loss"] = float("nan")
        return reply

    return tampered


def test_a_model_that_no_site_can_use_is_taken_back(tmp_path):
    """Round 2 ends with the model of round 1; with `stop` the run ends, and no honest client is named as the cause."""
    two, one = ({"rounds": rounds, "iterations": 1} for rounds in (2, 1))
    folder, _ = run_small(small_experiment(tmp_path, train=two, run=CONTINUE), tamper=nan_validation({2}))
    first, _ = run_small(small_experiment(tmp_path / "first", train=one))
    ours, theirs = (load_file(each / "last.safetensors") for each in (folder, first))
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)
    words = "round 2: the model's loss is not finite at 3 of 3 sites, and no update"
    with pytest.raises(ClientFailedError, match=words):
        run_small(small_experiment(tmp_path / "stop", train=two), tamper=nan_validation({2}))


def all_huge(message, reply):
    """Every client's weights are 3e38 in round 2, so that no single one is to blame."""
    return tamper(everywhere(3e38), victims=("rot0", VICTIM, "rot30"))(message, reply)


def outlying(message, reply):
    """The victim's update is much larger than the others', and no site can use the model."""
    larger = tamper(lambda arrays: {n: a * 30 if a.dtype.kind == "f" else a for n, a in arrays.items()})
    return nan_validation({2})(message, larger(message, reply))


@pytest.mark.parametrize(("change", "reason"), [
    (outlying, "the model was taken back because of 'rot15'"),
    (all_huge, "the outputs of the aggregated model are not finite"),
])  # fmt: skip
def test_the_records_of_a_dropped_round_say_so(tmp_path, change, reason):
    """No client has a weight or a local accuracy in it, by which the round could be selected."""
    run = {**CONTINUE, "select_on": "local", "update_limit": 0}
    folder, _ = run_small(small_experiment(tmp_path, train=SHORT, run=run), tamper=change)
    clients = pd.read_csv(folder / "clients.csv").set_index("round")
    assert clients.loc[2, ["weight", "local_validation_accuracy"]].isna().all(axis=None)
    assert clients.loc[[1, 3], ["weight", "local_validation_accuracy"]].notna().all(axis=None)
    assert clients.loc[[1, 3], "status"].eq("ok").all()
    status = clients.loc[2].set_index("client")["status"]
    assert status[VICTIM].startswith("reply refused" if change is outlying else "not used: ")
    assert status.drop(VICTIM).str.startswith("not used: ").all()
    assert status.drop(VICTIM).str.contains(reason).all()
    rounds = pd.read_csv(folder / "rounds.csv").set_index("round")
    assert rounds["failed"].tolist() == [0, 0, 3, 0]
    assert rounds["clients"].tolist() == [0, 3, 0, 3]
    assert pd.isna(rounds.loc[2, "mean_local_validation_accuracy"])


def test_one_site_that_cannot_use_it_is_that_sites_failure(tmp_path):
    """When fewer than half of the sites fail, the model is kept."""
    train = {"rounds": 2, "iterations": 1}
    folder, _ = run_small(small_experiment(tmp_path, train=train, run=CONTINUE), tamper=nan_validation({2}, ("rot0",)))
    assert "validation refused" in by_client(folder).loc[(2, "rot0"), "status"]
    assert by_client(folder).loc[(2, VICTIM), "status"] == "ok"
