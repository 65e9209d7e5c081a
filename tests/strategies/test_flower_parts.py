"""Flower's strategies as parts: numbers worked out by hand, Flower's own classes, neutral settings, resuming."""

import math
from dataclasses import replace

import flwr.serverapp.strategy as theirs
import numpy as np
import pytest
from flwr.serverapp.strategy.multikrum import select_multikrum
from support import small_experiment

from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe
from fedsim.settings.experiment import Experiment
from strategies.aggregate import weighted_mean
from strategies.fuse.bulyan import Bulyan
from strategies.fuse.coordinate_median import CoordinateMedian
from strategies.fuse.krum import Krum, selected_by_krum
from strategies.fuse.q_fed_avg import QFedAvg
from strategies.fuse.trimmed_mean import TrimmedMean
from strategies.parts import RefusedUpdateError, ServerRound, Update
from strategies.refine.flower_optimizer import FedAdagrad, FedAdam, FedAvgM, FedYogi
from strategies.wire import flower_strategies as flower


def model(*w, mean=0.0, count=0):
    return {
        "w": np.array(w, np.float32),
        "mean": np.array([mean], np.float32),
        "count": np.array(count, np.int64),
    }


def steps(part, start, *targets):
    arrays, found = {}, []
    theta = model(start)
    for round, target in enumerate(targets, start=1):
        server = ServerRound(round, 9, ["a"], theta, arrays=arrays, parameters=frozenset({"w"}))
        fused = model(target, mean=round, count=round)
        theta = part.refine(fused, server)
        assert theta["mean"] == fused["mean"]  # buffers take the fused value
        assert theta["count"] == fused["count"]
        assert theta["w"].dtype == np.float32
        found.append(theta["w"].item())
    return found


def test_fedavgm_by_hand():
    """theta 1 -> .5 (m = .5); then the clients' mean is .25: m = .45 + .25 = .7, theta = .5 - .7 = -.2."""
    assert steps(FedAvgM(1.0, 0.9), 1.0, 0.5, 0.25) == pytest.approx([0.5, -0.2], abs=1e-7)
    assert steps(FedAvgM(0.5, 0.0), 1.0, 0.5, 0.25) == pytest.approx([0.75, 0.5], abs=1e-7)


def test_fedadam_by_hand():
    """Delta = .5: m = .05, v = .0025, factor .1 sqrt(1 - .99^2)/(1 - .9^2) = .0742460; then Delta = -.2 from there."""
    first = 0.1 * math.sqrt(0.0199) / 0.19 * 0.05 / (0.05 + 0.001)
    assert first == pytest.approx(0.0727902, abs=1e-7)
    m, v = 0.9 * 0.05 - 0.02, 0.99 * 0.0025 + 0.01 * 0.04
    second = 0.1 * math.sqrt(1 - 0.99**3) / (1 - 0.9**3) * m / (math.sqrt(v) + 0.001)
    found = steps(FedAdam(), 1.0, 1.5, 1 + first - 0.2)
    assert found == pytest.approx([1 + first, 1 + first + second], abs=1e-6)


def test_fedyogi_and_fedadagrad_by_hand():
    """Yogi: v = .0025, step .01 .05/.051; then Delta = .1: v = .0024. Adagrad: v = .25, step .1 .5/.501; then .26."""
    first = 0.01 * 0.05 / 0.051
    second = 0.01 * (0.9 * 0.05 + 0.01) / (math.sqrt(0.0025 + 0.01 * 0.01) + 0.001)
    assert steps(FedYogi(), 1.0, 1.5, 1.1 + first) == pytest.approx([1 + first, 1 + first + second], abs=1e-6)
    first = 0.1 * 0.5 / 0.501
    second = 0.1 * 0.1 / (math.sqrt(0.26) + 0.001)
    assert steps(FedAdagrad(), 1.0, 1.5, 1.1 + first) == pytest.approx([1 + first, 1 + first + second], abs=1e-6)


@pytest.mark.parametrize(
    "part", [FedAdam(1e6, 0.0, 0.0, 1e6), FedYogi(1e6, 0.0, 0.0, 1e6), FedAdagrad(1e6, 1e6), FedAvgM(1.0, 0.0)]
)
def test_neutral_optimizers_are_fedavg(part):
    assert steps(part, 1.0, 1.5, 1.3) == pytest.approx([1.5, 1.3], abs=1e-5)


def updates(*columns, counts=None):
    """Replies of the clients a, b, c, ..., with counters 1, 2, 3, ..."""
    return [
        Update("abcdefghijk"[k], 10, model(*column, mean=k * k, count=k + 1), {"train_loss": 1.0})
        for k, column in enumerate(columns)
    ]


def server(*start):
    return ServerRound(1, 3, [], model(*start), parameters=frozenset({"w"}), experiment=Experiment(train={"lr": 0.5}))


def even(replies):
    return {update.client: 1 / len(replies) for update in replies}


def test_krum_by_hand():
    """0, 1, 1.1, 9 with f = 0, two nearest of each: scores 1+1.21, 1+.01, .01+1.21, 64+62.41; the second is chosen."""
    replies = updates([0.0], [1.0], [1.1], [9.0])
    seen = server(5.0)
    fused = Krum().fuse(replies, even(replies), seen)
    assert (fused["w"].item(), fused["mean"].item(), fused["count"].item()) == (1.0, 1.0, 2)
    assert [seen.client_columns[client]["weight"] for client in "abcd"] == [0, 1, 0, 0]
    two = Krum(select=2).fuse(replies, even(replies), server(5.0))  # scores: b 1.01, c 1.22
    assert two["w"].item() == pytest.approx(1.05)
    assert two["count"] == 3
    whole = Krum(select=9).fuse(replies, even(replies), server(5.0))
    expected = weighted_mean([reply.arrays for reply in replies], [1] * 4)
    np.testing.assert_equal(whole, expected)


def test_bulyan_by_hand():
    """f = 1 of 7: of the five with the lowest scores, the three values nearest to the median are averaged: 2, 3, 4."""
    replies = updates([1.0], [2.0], [3.0], [4.0], [5.0], [400.0], [-900.0])
    fused = Bulyan(1).fuse(replies, even(replies), server(0.0))
    assert fused["w"].item() == pytest.approx(3.0)
    assert fused["mean"].item() == 9.0  # the median of 0, 1, 4, .. 36
    few = updates([1.0], [2.0], [3.0])
    kept = Bulyan(1).fuse(few, even(few), server(7.0))
    assert kept["w"].item() == 7.0
    mean = Bulyan(0).fuse(few, even(few), server(7.0))
    assert mean["w"].item() == pytest.approx(2.0)


def test_q_fed_avg_by_hand():
    """From 0, models 1 and 3 with losses 2 and 1, q = 1, L = 2: 10/46. q = 0: the mean. A negative loss is refused."""
    replies = updates([1.0], [3.0])
    replies[0].metrics["train_loss"] = 2.0
    fused = QFedAvg(1.0).fuse(replies, even(replies), server(0.0))
    assert fused["w"].item() == pytest.approx(10 / 46, rel=1e-6)
    assert fused["mean"].item() == 0.5
    assert QFedAvg(0.0).fuse(replies, even(replies), server(0.5))["w"].item() == pytest.approx(2.0)
    replies[1].metrics["train_loss"] = -1.0
    with pytest.raises(RefusedUpdateError, match="b: its training loss is -1"):
        QFedAvg().fuse(replies, even(replies), server(0.0))


def test_q_fed_avg_is_flower_s():
    rng = np.random.default_rng(3)
    replies = updates(*rng.normal(size=(7, 5)))
    for reply in replies:
        reply.metrics["train_loss"] = float(rng.uniform(0, 3))
    start = rng.normal(size=5).astype(np.float32)
    rule = theirs.QFedAvg(client_learning_rate=0.5, q=0.7)
    rule.current_arrays = flower.record({"w": start.astype(np.float64)})
    losses = [{flower.WEIGHT: 1, flower.LOSS: reply.metrics["train_loss"]} for reply in replies]
    expected = flower.aggregate(rule, 1, [{"w": reply.arrays["w"].astype(np.float64)} for reply in replies], losses)
    found = QFedAvg(0.7).fuse(replies, even(replies), server(*start))
    np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-6)


def test_bulyan_and_krum_are_flower_s():
    rng = np.random.default_rng(3)
    replies = updates(*rng.normal(size=(11, 5)))
    moved = [{"w": reply.arrays["w"].astype(np.float64)} for reply in replies]
    expected = flower.aggregate(flower.Bulyan(num_malicious_nodes=2), 1, moved, [{flower.WEIGHT: 1}] * 11)
    found = Bulyan(2).fuse(replies, even(replies), server(*[0.0] * 5))
    np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-6)
    nearest = flowers_selection(moved, 2, 4)
    seen = server(*[0.0] * 5)
    Krum(2, 4).fuse(replies, even(replies), seen)
    assert [index for index in range(11) if seen.client_columns["abcdefghijk"[index]]["weight"]] == sorted(nearest)


def flowers_selection(states, malicious, count):
    contents = [flower.answer(state, {}).content for state in states]
    chosen = select_multikrum(contents, malicious, count)
    return [next(index for index, content in enumerate(contents) if content is one) for one in chosen]


def test_a_huge_model_takes_no_digits_from_the_others():
    """Beside an update of 1e9, one that is ten times too long must still be seen as such, as by Flower's function."""
    rng = np.random.default_rng(0)
    moved = [{"w": rng.normal(size=500) * scale} for scale in (10, 1, 1, 1, 1, 1, 1, 1e9)]
    assert selected_by_krum(moved, 2, 6) == flowers_selection(moved, 2, 6)
    assert sorted(selected_by_krum(moved, 2, 6)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("clients", [3, 4, 7])
def test_ties_are_flower_s(clients):
    rng = np.random.default_rng(clients)
    for _ in range(20):
        moved = [{"w": rng.normal(size=300)} for _ in range(clients)]
        assert selected_by_krum(moved, 0, 2) == flowers_selection(moved, 0, 2)


def test_our_median_and_trimmed_mean_are_flower_s():
    rng = np.random.default_rng(0)
    for clients in (3, 4, 7):
        states = [{"w": rng.normal(size=(4, 3)).astype(np.float32)} for _ in range(clients)]
        replies = [Update(f"c{k}", 1, state) for k, state in enumerate(states)]
        said = [{flower.WEIGHT: 1}] * clients
        for rule, part in (
            (theirs.FedMedian(), CoordinateMedian()),
            (theirs.FedTrimmedAvg(beta=0.34), TrimmedMean(0.34)),
        ):
            expected = flower.aggregate(rule, 1, states, said)
            ours = part.fuse(replies, even(replies), replace(server(0.0), previous={}))
            np.testing.assert_allclose(ours["w"], expected["w"], rtol=1e-6)


@pytest.mark.parametrize(("part", "least"), [("krum", 5), ("bulyan", 7)])
def test_too_few_clients_for_the_guarantee(part, least, tmp_path):
    settings = {"name": "fedavg", "fuse": part, part: {"malicious": 1}}
    with pytest.raises(UserError, match=f"needs {least} clients"):
        build_recipe(small_experiment(tmp_path, settings))
    build_recipe(small_experiment(tmp_path, settings, data={"clients_per_domain": 3}))
