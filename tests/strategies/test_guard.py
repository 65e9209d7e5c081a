"""One reply cannot destroy the model: limits for updates, a check of the fused model, and the return to an old one."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file
from support import run_small
from tampering import CONTINUE, EVERYBODY, OTHERS, VICTIM, floats, rows_of, short, tamper

from fedsim.common.errors import ClientFailedError
from fedsim.settings import RunSettings
from strategies import unusable
from strategies.accept import Complaints
from strategies.banks.classifier_gradients import ClassifierGradients
from strategies.parts import Update
from strategies.wire.fused_check import client_of_largest_update, is_ruined, model_probe
from strategies.wire.limits import (
    lower_median,
    metrics_over_limit,
    over_limit,
    records_over_limit,
    remember,
    update_size,
)
from strategies.wire.reply_checks import RejectedReplyError, check_nonnegative
from strategies.wire.sites import implausible


def f32(*values):
    return np.array(values, np.float32)


ONE, OTHER = np.random.default_rng(0).standard_normal((2, 50_000)).astype(np.float32)


@pytest.mark.parametrize(("after", "before", "size"), [
    # sqrt((3-1)^2 + (1-2)^2 + 2^2) = 3; counters are ignored
    ({"w": f32(3, 1), "v": np.array([2.0]), "n": np.array(9)}, {"w": f32(1, 2), "v": np.zeros(1), "n": np.array(5)}, 3),
    ({"w": f32(*[3e38] * 4)}, {"w": f32(*[-3e38] * 4)}, 12e38),  # no overflow
    ({"w": f32(np.inf)}, {"w": f32(0)}, math.inf),
    ({"w": ONE}, {"w": OTHER}, np.linalg.norm(ONE.astype(np.float64) - OTHER.astype(np.float64))),
    ({"h": np.float16([2]), "d": np.array([1e100]), "f": f32(1)},
     {"h": np.float16([0]), "d": np.zeros(1), "f": f32(5)}, 1e100),
])  # fmt: skip
def test_the_size_of_an_update(after, before, size):
    assert update_size(after, before) == pytest.approx(size, rel=1e-8)


@pytest.mark.parametrize(("found", "expected"), [
    ([lower_median(values) for values in ([], [3.0], [1.0, 9.0], [9.0, 1.0, 4.0], [4, 1, 9, 2])], [0, 3, 1, 4, 2]),
    # who hardly moves makes nobody stand out
    (client_of_largest_update({"a": 1e-4, "b": 1.0, "c": 1.1}), ("c", pytest.approx(1.1))),
    (client_of_largest_update({"a": 1.0}), ("a", math.inf)),
    # sums of gradients are compared as means
    (ClassifierGradients().compared({"head.bias": f32(6), "batches": f32(3)}), {"head.bias": f32(2)}),
])  # fmt: skip
def test_small_functions_by_hand(found, expected):
    assert found == expected


@pytest.mark.parametrize(("sizes", "refused"), [
    ({"a": 1.0, "b": 2.0, "c": 200.0}, ""),  # 100 times the upper median of (1, 2)
    ({"a": 1.0, "b": 2.0, "c": 201.0}, "c"),
    ({"a": 1e-4, "b": 1.0, "c": 1.1}, ""),  # one of three that hardly moves has no honest one refused
    ({"a": 3e38, "b": 3e38, "c": 1.0, "d": 1.1, "e": 0.9}, "ab"),
    ({"a": 1.0, "b": 3e38, "c": 3e38}, ""),  # two of three that lie together; the fused model is checked
    ({"a": 1e-4, "b": 1e-4, "c": 1.0}, "c"),  # and they have the third refused
    ({"a": 1e-4, "b": 1.0}, "ab"),  # of two, one that hardly moves does not win
    ({"a": 1.0, "b": 90.0}, ""), ({"a": 0.0, "b": 5.0}, ""),  # nothing to compare with
])  # fmt: skip
def test_who_is_over_the_limit(sizes, refused):
    """A client is compared with the upper median of the others, against which one of three has no power."""
    found = over_limit(sizes, {}, 1.0, 100.0)
    assert found.keys() == set(refused)
    assert all(("of two clients, either may be" in reason) == (len(sizes) == 2) for reason in found.values())
    assert over_limit(sizes, {}, 1.0, 0.0) == {}


def test_alone_a_client_is_held_against_itself():
    """It is compared with its own earlier rounds, and before these with the model."""
    own = {"a": [3.0, 2.0, 4.0]}
    (reason,) = over_limit({"a": 301.0}, own, 1.0, 100.0).values()
    assert reason.startswith("its update has the norm 301, 100 times the median of its own")
    assert not over_limit({"a": 300.0}, own, 1.0, 100.0)
    assert over_limit({"a": 201.0}, {}, 2.0, 100.0)
    for size in range(30):
        remember(own, "a", size)
    assert own == {"a": list(range(10, 30))}


@pytest.mark.parametrize(("not_finite", "too_large", "asked", "said"), [
    (1, 0, 3, ""), (2, 0, 3, "finite at 2 of 3 sites; its update has 30 times"), (2, 0, 2, "2 of 2 sites; its update"),
    (0, 1, 3, ""), (0, 2, 3, "10 times what it was, or not finite, at 2 of 3 sites; its"), (1, 1, 3, "at 2 of 3 sites"),
    (0, 1, 2, "1 of 2 sites (of two clients, either may be the wrong one)"), (1, 0, 2, "1 of 2 sites (of two"),
])  # fmt: skip
def test_a_model_is_useless_when_more_than_half_of_the_sites_say_so(not_finite, too_large, asked, said):
    complaints = Complaints(asked, not_finite, too_large)
    client, reason = unusable.refused_by_sites({"a": 1.0, "b": 1.0, "c": 30.0}, complaints)
    assert said in reason
    named = "" if "of two" in said or not said else "c"
    assert (client, bool(reason)) == (named, bool(said))
    # clients that diverge together are no liars
    alike = unusable.refused_by_sites({"a": 1.0, "b": 1.0, "c": 2.9}, complaints)
    assert bool(alike[1]) == (2 * not_finite > asked)


def test_a_client_that_trains_alone_does_not_stand_out():
    """Pooled training on the vowels at the file's rate ended in three of fifteen runs: the loss rose for a round."""
    assert unusable.refused_by_sites({"pooled": 3.0}, Complaints(asked=1, not_finite=0, too_large=1)) == ("", "")
    client, reason = unusable.refused_by_sites({"pooled": 3.0}, Complaints(asked=1, not_finite=1, too_large=0))
    assert (client, "not finite at 1 of 1 sites" in reason) == ("pooled", True)


def test_a_client_that_ruined_a_model_has_a_small_limit_from_then_on():
    sizes = {"a": 1.0, "b": 1.1, "c": 3.5}
    assert over_limit(sizes, {}, 1.0, 100.0) == {}
    (reason,) = over_limit(sizes, {}, 1.0, 100.0, {"c"}).values()
    assert reason.endswith("the limit of a client that has ruined a model is 3")
    assert over_limit({**sizes, "c": 3.2}, {}, 1.0, 100.0, {"c"}) == {}
    assert over_limit(sizes, {}, 1.0, 2.0, {"c"})["c"].endswith("has ruined a model is 2")


@pytest.mark.parametrize(("loss", "lowest", "ruined"), [
    (100.0, None, False), (100.1, None, True), (10.1, 0.001, True), (39.0, 4.0, False), (41.0, 4.0, True),
    (math.nan, 1.0, False),
])  # fmt: skip
def test_the_loss_of_a_ruined_model(loss, lowest, ruined):
    assert is_ruined(loss, lowest) == ruined


@pytest.mark.parametrize(("counts", "refused"), [
    ({"a": 1000, "b": 1100, "c": 9}, ""),  # one of three that claims 9 examples has no honest one refused
    ({"a": 1000, "b": 1100, "c": 10**9}, "c"),
    ({"a": 1000, "b": 9}, "a"),
])  # fmt: skip
def test_whose_number_of_examples_is_implausible(counts, refused):
    reasons = implausible(counts, 100.0)
    assert reasons.keys() == set(refused)
    assert all(("of two clients" in reason) == (len(counts) == 2) for reason in reasons.values())


@pytest.mark.parametrize(("name", "values", "momentum", "refused"), [
    ("gradient_count", (10.0, 12.0, 11_900.0), 0.9, ""),  # 100 times the steps make 1000 times the gradients
    ("gradient_count", (10.0, 12.0, 12_100.0), 0.9, "c"),
    ("steps", (1e-6, 12, 10), 0.0, ""), ("steps", (1, 1000), 0.0, "ab"),
    ("learning_rate", (0.0, 0.0, 0.0), 0.0, ""), ("learning_rate", (0.1,), 0.0, ""),
    ("received_loss", (1e-5, 1e-6, 0.5), 0.0, ""),  # no fault where the others' models fit to 1e-5
    ("received_loss", (2.3, 2.2, 1e30), 0.0, "c"), ("received_loss", (2e3, 3e3, 2e5), 0.0, ""),
])  # fmt: skip
def test_metrics_are_limited_by_those_of_the_others(name, values, momentum, refused):
    metrics = {client: {name: value} for client, value in zip("abc", values)}
    found = metrics_over_limit(metrics, {name}, RunSettings(), momentum)
    assert found.keys() == set(refused)
    assert all(("either may be the wrong one" in reason) == (len(values) == 2) for reason in found.values())
    assert metrics_over_limit(metrics, set(), RunSettings(), momentum) == {}
    assert metrics_over_limit(metrics, {name}, RunSettings(examples_limit=0, update_limit=0), momentum) == {}


@pytest.mark.parametrize(("sizes", "limit", "refused"), [
    ((1.0, 2.0, 201.0), 100.0, "c"), ((1.0, 2.0, 200.0), 100.0, ""),
    ((1e-4, 1e-5, 4.9), 100.0, ""),  # a smaller norm than the model's is never too large
    ((1e-4, 1.0, 1e30), 0.0, ""), ((0.0, 0.0, 9.0), 100.0, ""),  # of records that are 0 nothing is known
])  # fmt: skip
def test_records_are_limited_by_those_of_the_others(sizes, limit, refused):
    assert records_over_limit(dict(zip("abc", sizes)), {"w": f32(3, 4)}, limit).keys() == set(refused)


def test_the_fused_model_is_probed_and_held_against_the_updates():
    """It finds finite weights whose outputs are not finite, and does not change the network. Running variances
    of honest models may be above 1e4."""
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)).train()
    before = {name: value.numpy().copy() for name, value in net.state_dict().items()}
    probe = model_probe(net, 1, 2, 2)
    assert probe(before)
    assert not probe({**before, "1.weight": np.full((3, 4), 3e38, np.float32)})
    assert net.training
    assert all(np.array_equal(value.numpy(), before[name]) for name, value in net.state_dict().items())
    finite = lambda arrays: bool(np.abs(arrays["w"]).max() < 1e30)  # noqa: E731
    for previous, huge in (({"w": f32(2e4)}, {"w": f32(sign * 3e38)}) for sign in (1, -1)):
        assert "not finite" in unusable.cannot_be_sent(server_of(previous, finite), huge)
        assert unusable.cannot_be_sent(server_of(previous, finite), previous) == ""
        assert unusable.cannot_be_sent(server_of(huge, finite), huge) == ""
    updates, sizes = [Update("a", 1, {}), Update("b", 1, {})], {"a": 1.0, "b": 2.0, "refused": 1e9}
    assert unusable.moved_too_far(server_of(limit=100.0), 200.0, updates, sizes) == ""
    assert unusable.moved_too_far(server_of(limit=0.0), 1e30, updates, sizes) == ""
    assert "moves 101 times as far" in unusable.moved_too_far(server_of(limit=100.0), 202.0, updates, sizes)


def server_of(previous=None, probe=None, limit=100.0):
    """What these two checks read of a server."""
    experiment = SimpleNamespace(run=SimpleNamespace(update_limit=limit))
    return SimpleNamespace(parts=SimpleNamespace(start=previous), probe=probe, experiment=experiment)


@pytest.mark.parametrize(("values", "fine"), [((1.0, 0.0, 0.2), True), ((0.0, 0.0, 1.0), False), ((1.0, -0.1), False)])
def test_variances_are_not_negative_and_not_mostly_zero(values, fine):
    """Zero variances multiply values by 300 in every layer; a single channel may have variance zero."""
    with nullcontext() if fine else pytest.raises(RejectedReplyError, match="running_var"):
        check_nonnegative({"running_var": f32(*values), "count": np.array(0)}, ["running_var", "count"])


HUGE = floats(lambda array: np.full_like(array, 3e38))


def nan_validation(clients=EVERYBODY):
    return tamper(lambda content: content["metrics"].update(loss=float("nan")), "evaluate", clients=clients)


def test_without_a_limit_the_fused_model_is_checked(tmp_path):
    """3e38 passes every check of one reply; the fused model is not sent, and the wrong reply is found."""
    status = rows_of(run_small(short(tmp_path, 3, run={**CONTINUE, "update_limit": 0}), tamper=tamper(HUGE))[0])[
        "status"
    ]
    assert "without it the model is usable" in status[2, VICTIM]
    assert status.loc[3].eq("ok").all()


def test_a_model_that_no_site_can_use_is_taken_back(tmp_path):
    """Round 2 ends with the model of round 1; with `stop` the run ends, and no honest client is named as the cause."""
    folder, first = run_small(short(tmp_path), tamper=nan_validation())[0], run_small(short(tmp_path / "first", 1))[0]
    np.testing.assert_equal(*(load_file(each / "last.safetensors") for each in (folder, first)))
    words = "round 2: the model's loss is not finite at 3 of 3 sites, and no update"
    with pytest.raises(ClientFailedError, match=words):
        run_small(short(tmp_path / "stop", run={}), tamper=nan_validation())


def outlying(message, reply):
    """The victim's update is much larger than the others', and no site can use the model."""
    return nan_validation()(message, tamper(floats(lambda array: array * 30))(message, reply))


@pytest.mark.parametrize(("change", "blamed", "reason"), [
    (outlying, "reply refused", "the model was taken back because of 'rot15'"),
    (tamper(HUGE, clients=EVERYBODY), "not used: ", "the outputs of the aggregated model are not finite"),
])  # fmt: skip
def test_the_records_of_a_dropped_round_say_so(tmp_path, change, blamed, reason):
    """No client has a weight or a local accuracy in it, by which the round could be selected."""
    run = {**CONTINUE, "select_on": "local", "update_limit": 0}
    folder, _ = run_small(short(tmp_path, 3, run=run), tamper=change)
    clients, used = rows_of(folder), ["weight", "local_validation_accuracy"]
    assert clients.loc[2, used].isna().all(axis=None)
    assert clients.loc[[1, 3], used].notna().all(axis=None)
    assert clients.loc[[1, 3], "status"].eq("ok").all()
    status = clients.loc[2, "status"]
    assert status[VICTIM].startswith(blamed)
    assert all(status[name].startswith("not used: ") and reason in status[name] for name in OTHERS)
    rounds = pd.read_csv(folder / "rounds.csv")
    assert (rounds["failed"].tolist(), rounds["clients"].tolist()) == ([0, 0, 3, 0], [0, 3, 0, 3])
    assert pd.isna(rounds.loc[2, "mean_local_validation_accuracy"])
