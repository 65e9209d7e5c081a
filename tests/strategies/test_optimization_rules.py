"""FedGMA, AFL and FedNova on numbers worked out by hand."""

import numpy as np
import pytest

from strategies.fuse.gradient_mask import GradientMask
from strategies.fuse.normalized_average import NormalizedAverage
from strategies.fuse.weighted_mean import WeightedMean
from strategies.parts import RefusedUpdateError, ServerRound, Update
from strategies.weights.agnostic import AgnosticWeights


def replies(*columns, start=0.0, metrics=()):
    """(checked replies of the clients a, b, ..., the round). The parameter `w` of a client moved by its number.

    The running means `mean` of the clients are 0, 10, 20, ...
    """
    width = len(columns[0])
    previous = {"w": np.full(width, start, np.float32), "mean": np.zeros(1, np.float32)}
    updates = [
        Update(name, 10, {"w": previous["w"] + np.array(column, np.float32), "mean": np.full(1, 10 * k, np.float32)})
        for k, (name, column) in enumerate(zip("abcdef", columns))
    ]
    for update, values in zip(updates, metrics):
        update.metrics |= values
    clients = [update.client for update in updates]
    return updates, ServerRound(1, 4, clients, previous, updates=updates, parameters=frozenset({"w"}))


def uniform(updates):
    return {update.client: 1 / len(updates) for update in updates}


@pytest.mark.parametrize(("part", "expected"), [
    (GradientMask(0.4), (0, 2, 0.5 / 3)),
    (GradientMask(0.4, "hard"), (0, 2, 0)),
    (GradientMask(1 / 3), (0, 2, 0.5)),  # tau itself moves in full
    (GradientMask(0.4, "feddg_benchmark"), (0, 1.6, 0)),
])  # fmt: skip
def test_mask_numbers_by_hand(part, expected):
    """Coordinates (1, 2, -3), (1, 2, 3), (1, 1, -.5): averages (0, 2, .5), A = (1/3, 1, 1/3)."""
    updates, server = replies(*zip((1, 2, -3), (1, 2, 3), (1, 1, -0.5)))
    fused = part.fuse(updates, uniform(updates), server)
    np.testing.assert_allclose(fused["w"], expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(fused["mean"], [10.0])  # buffers are never masked


def test_mask_without_a_threshold_is_fedavg_bit_for_bit():
    rng = np.random.default_rng(0)
    updates, server = replies(*rng.normal(size=(3, 50)), start=0.7)
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    ours, plain = (rule.fuse(updates, weights, server) for rule in (GradientMask(0.0), WeightedMean()))
    assert np.array_equal(ours["w"], plain["w"])
    masked = server.details[0]
    assert (masked["quantity"], masked["name"], masked["value"]) == ("gradient_mask", "w", 1.0)


def agnostic(gamma, losses, round=2, state=None, delivered="abc"):
    updates, server = replies((0,), (0,), (0,), metrics=[{"received_loss": loss} for loss in losses])
    server.round, server.state = round, {} if state is None else state
    updates = [update for update in updates if update.client in delivered]
    return list(AgnosticWeights(gamma).weigh(updates, server).values())


def test_agnostic_weights_by_hand():
    """Losses 1, 2, 3 with gamma .1 and .5; equal losses; gamma 0; the first round is uniform."""
    np.testing.assert_allclose(agnostic(0.1, (1, 2, 3)), (0.7 / 3, 1 / 3, 1.3 / 3), atol=1e-12)
    np.testing.assert_allclose(agnostic(0.5, (1, 2, 3)), (0, 0.25, 0.75), atol=1e-12)
    np.testing.assert_allclose(agnostic(0.5, (2, 2, 2)), (1 / 3, 1 / 3, 1 / 3), atol=1e-12)
    assert agnostic(0.0, (1, 2, 3)) == [1 / 3] * 3
    assert agnostic(0.5, (1, 2, 3), round=1) == [1 / 3] * 3


def test_agnostic_weights_accumulate_and_survive_an_absent_client():
    """At gamma .1 the second round starts with the weights of the first; if all weights would be 0, they are equal."""
    state = {}
    agnostic(0.1, (1, 2, 3), 2, state)
    second = agnostic(0.1, (1, 2, 3), 3, state)
    np.testing.assert_allclose(second, (0.4 / 3, 1 / 3, 1.6 / 3), atol=1e-12)
    np.testing.assert_allclose(agnostic(0.0, (1, 2, 3), 4, state, delivered="ac"), (0.2, 0.8), atol=1e-12)
    assert agnostic(0.0, (0, 0, 0), 4, {"lambda": {"a": 1.0, "b": 0.0, "c": 0.0}}, delivered="bc") == [0.5, 0.5]
    with pytest.raises(RefusedUpdateError, match="received_loss"):
        agnostic(0.1, ())


def fednova(moves, counts, steps=None, part=None, shares=None):
    metrics = [{"gradient_count": a, "steps": t} for a, t in zip(counts, steps or counts)]
    updates, server = replies(*[(move,) for move in moves], metrics=metrics)
    weights = dict(zip("abcdef", shares)) if shares else uniform(updates)
    return (part or NormalizedAverage()).fuse(updates, weights, server)


def test_fednova_of_two_clients():
    """With w = 0, p = 1/2, tau = (2, 4), w_k - w = -(2, 8): -4.5, where FedAvg gives -5 and Flower's baseline -4."""
    fused = fednova((-2, -8), (2, 4))
    np.testing.assert_allclose(fused["w"], [-4.5], rtol=1e-6)
    np.testing.assert_allclose(fused["mean"], [5.0])


def test_fednova_by_hand():
    """p = (.25, .75), a = (2.9, 5.61): tau_eff 4.9325, moves per gradient -1 and -2 give -4.9325 * 1.75; with the
    numbers of steps (2, 3) in tau_eff, 2.75 * 1.75. Equal counts are FedAvg."""
    moves = (-2.9, -11.22)
    np.testing.assert_allclose(fednova(moves, (2.9, 5.61), shares=(0.25, 0.75))["w"], [-4.9325 * 1.75], rtol=1e-6)
    by_steps = fednova(moves, (2.9, 5.61), (2, 3), NormalizedAverage("steps"), (0.25, 0.75))
    np.testing.assert_allclose(by_steps["w"], [-2.75 * 1.75], rtol=1e-6)
    np.testing.assert_allclose(fednova((-2, -8), (3, 3))["w"], [-5], rtol=1e-6)
    with pytest.raises(RefusedUpdateError, match="not above 0"):
        fednova((-2, -8), (3, 0))
