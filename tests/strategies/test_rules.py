"""FedGMA, AFL, FedNova, FedGaLA, FedDyn and FedCM on numbers worked out by hand, and the order of parts."""

from contextlib import suppress
from itertools import combinations

import numpy as np
import pytest
from replies import replies, uniform

from fedsim.common.errors import UserError
from fedsim.methods.assembly import assemble
from fedsim.methods.table import METHODS
from fedsim.parts.part import part_name
from strategies.banks.global_direction import GlobalDirection
from strategies.fuse.aligned_weights import AlignedWeights, alignment_weights
from strategies.fuse.gradient_mask import GradientMask
from strategies.fuse.normalized_average import NormalizedAverage
from strategies.fuse.semantic_divergence import SemanticDivergence
from strategies.fuse.weighted_mean import WeightedMean
from strategies.parts import RefusedUpdateError, ServerRound, Update
from strategies.refine.dynamic_correction import DynamicCorrection
from strategies.weights.agnostic import AgnosticWeights


def close(found, expected, atol=1.5e-6):
    np.testing.assert_allclose(found, expected, atol=atol, rtol=0)


@pytest.mark.parametrize(("part", "expected"), [
    (GradientMask(0.4), (0, 2, 0.5 / 3)),
    (GradientMask(0.4, "hard"), (0, 2, 0)),
    (GradientMask(1 / 3), (0, 2, 0.5)),  # tau itself moves in full
    (GradientMask(0.4, "feddg_benchmark"), (0, 1.6, 0)),
])  # fmt: skip
def test_mask_numbers_by_hand(part, expected):
    """Coordinates (1, 2, -3), (1, 2, 3), (1, 1, -.5): averages (0, 2, .5), A = (1/3, 1, 1/3)."""
    updates, server = replies((1, 1, 1), (2, 2, 1), (-3, 3, -0.5))
    fused = part.fuse(updates, uniform(updates), server)
    close(fused["w"], expected)
    close(fused["mean"], [10.0])  # buffers are never masked


@pytest.mark.parametrize(("granularity", "x"), [("tensor", 1.5), ("module", 3 * 5**0.5 / (2**0.5 + 20**0.5))])
def test_divergence_of_a_module_is_that_of_all_its_tensors(granularity, x):
    """Averages are 1, so that the clients' distances in a.x are sqrt(2), sqrt(5), sqrt(5), and in a.y 2, 1, 1."""
    names, values = ("a.x.weight", "a.x.bias", "a.y.weight"), ((0, 0, 3), (0, 3, 0), (3, 0, 0))
    updates = [Update(name, 1, dict(zip(names, np.float32(own)[:, None]))) for name, own in zip("abc", values)]
    fused = SemanticDivergence(granularity=granularity).fuse(updates, {}, ServerRound(1, 4, list("abc"), {}))
    close([fused[name].item() for name in names], (x, x, 1.5))


def agnostic(gamma, losses, round=2, state=None, delivered="abc"):
    """The weights after one round of AFL, when the received model has these losses."""
    updates, server = replies((0,), (0,), (0,), metrics=[{"received_loss": loss} for loss in losses])
    server.round, server.state = round, {} if state is None else state
    updates = [update for update in updates if update.client in delivered]
    return list(AgnosticWeights(gamma).weigh(updates, server).values())


def test_agnostic_weights_by_hand():
    """At gamma .1 the second round starts with the weights of the first; if all weights would be 0, they are equal."""
    state, lost = {}, {"lambda": {"a": 1.0, "b": 0.0, "c": 0.0}}
    for arguments, expected in (
        ((0.1, (1, 2, 3), 2, state), (0.7 / 3, 1 / 3, 1.3 / 3)),
        ((0.1, (1, 2, 3), 3, state), (0.4 / 3, 1 / 3, 1.6 / 3)),
        ((0.0, (1, 2, 3), 4, state, "ac"), (0.2, 0.8)), ((0.5, (1, 2, 3)), (0, 0.25, 0.75)),
        ((0.5, (2, 2, 2)), (1 / 3,) * 3), ((0.0, (1, 2, 3)), (1 / 3,) * 3), ((0.5, (1, 2, 3), 1), (1 / 3,) * 3),
        ((0.0, (0, 0, 0), 4, lost, "bc"), (0.5, 0.5)),
    ):  # fmt: skip
        close(agnostic(*arguments), expected, 1e-12)
    with pytest.raises(RefusedUpdateError, match="received_loss"):
        agnostic(0.1, ())


def fednova(moves, counts, steps=None, part=None, shares=None):
    metrics = [{"gradient_count": a, "steps": t} for a, t in zip(counts, steps or counts)]
    updates, server = replies(*[(move,) for move in moves], metrics=metrics)
    weights = dict(zip("abcdef", shares)) if shares else uniform(updates)
    return (part or NormalizedAverage()).fuse(updates, weights, server)


def test_fednova_by_hand():
    """p = (.25, .75), a = (2.9, 5.61): tau_eff 4.9325, moves per gradient -1 and -2 give -4.9325 * 1.75; with the
    numbers of steps (2, 3) in tau_eff, 2.75 * 1.75. For p = 1/2, a = (2, 4) and moves of -(2, 8) it is -4.5, where
    FedAvg gives -5 and Flower's baseline -4. Equal counts are FedAvg."""
    moves = (-2.9, -11.22)
    close(fednova(moves, (2.9, 5.61), shares=(0.25, 0.75))["w"], [-4.9325 * 1.75], 5e-6)
    close(fednova(moves, (2.9, 5.61), (2, 3), NormalizedAverage("steps"), (0.25, 0.75))["w"], [-2.75 * 1.75], 5e-6)
    fused = fednova((-2, -8), (2, 4))
    close((fused["w"][0], fused["mean"][0]), (-4.5, 5.0))
    close(fednova((-2, -8), (3, 3))["w"], [-5])
    with pytest.raises(RefusedUpdateError, match="not above 0"):
        fednova((-2, -8), (3, 0))


@pytest.mark.parametrize(("vectors", "gamma", "expected"), [
    (((1, 0), (0, 1), (1, 1)), 0.0, (0.315301, 0.315301, 0.369398)),
    (((1, 0), (0, 1), (1, 1)), 0.25, (0.319809, 0.319809, 0.360382)),
    (((1, 0), (0, 1), (1, 1)), 1.0, (1 / 3, 1 / 3, 1 / 3)),
    (((1, 0), (1, 0), (-1, 0)), 0.0, (0.5, 0.5, 0.0)),
    (((0.5, 0), (0, 0.3), (0.2, 0.2)), 0.0, (0.342162, 0.288857, 0.368981)),
    (((0, 0), (0, 0), (0, 0)), 0.0, (1 / 3, 1 / 3, 1 / 3)),
])  # fmt: skip
def test_alignment_weights_by_hand(vectors, gamma, expected):
    """Three moves, with gamma > 0, an opposite one, unequal lengths, no length; gamma = 1 gives equal weights."""
    close(alignment_weights(np.array(vectors, float), 3, gamma), expected, 1e-6)


def test_aligned_model_and_its_buffers():
    """Equal moves and an opposite one give w = (.5, .5, 0) for the models 11, 11 and 9; the buffer is weighted by p.
    The shares act on the common direction, not on the models."""
    shares = {"a": 0.5, "b": 0.25, "c": 0.25}
    updates, server = replies((1, 0), (1, 0), (-1, 0), start=10.0)
    fused = AlignedWeights().fuse(updates, shares, server)
    close(fused["w"], (11, 10), 1e-5)
    close(fused["mean"], [7.5])
    updates, server = replies((1, 0), (0, 1), (1, 1))
    expected = alignment_weights(np.array([(0.5, 0), (0, 0.25), (0.25, 0.25)]), 1, 0.0)
    close(AlignedWeights(n_it=1).fuse(updates, shares, server)["w"], expected @ np.array([(1, 0), (0, 1), (1, 1)]))


def test_dynamic_correction_counts_all_clients():
    """The server in the first two rounds: theta is 2, then 2.9; with one of two replies H changes half as much."""
    arrays, part = {}, DynamicCorrection()
    for moves, start, theta in (((0.5, 1.5), 0.0, 2.0), ((-0.525, 0.425), 2.0, 2.9)):
        updates, server = replies(*[(move,) for move in moves], start=start)
        server.arrays = arrays
        fused = WeightedMean().fuse(updates, uniform(updates), server)
        refined = part.refine(fused, server)
        assert (refined["w"].item(), refined["mean"].item()) == pytest.approx((theta, 5.0))
    partial, alone = replies((0.5,), (1.5,))
    alone.updates = partial[:1]
    assert part.refine({"w": np.array([0.5], np.float32)}, alone)["w"].item() == 0.75


def test_direction_is_the_last_move_per_gradient():
    """theta moved by -6 in 4 gradients at rate .5 (client a) and 2 at rate 1 (b): D = 6 / 2; no D without a move."""
    metrics = [{"gradient_count": 4, "learning_rate": 0.5}, {"gradient_count": 2, "learning_rate": 1.0}]
    updates, server = replies((-6,), (-6,), metrics=metrics)
    server.weights = uniform(updates)
    server.current = {"w": np.array([-6.0], np.float32), "mean": np.ones(1, np.float32)}
    assert {name: array.tolist() for name, array in GlobalDirection().make(server).items()} == {"w": [3.0]}
    server.updates = []
    assert GlobalDirection().make(server) == {}


def test_terms_and_refining_parts_have_an_order():
    """The names of two rows may stand in any order; sums come before products, corrections before averages."""
    for pair in combinations([name for name, row in METHODS.items() if row.terms or row.refine], 2):
        with suppress(UserError):
            one, two = (assemble({"name": "+".join(names)}, {}) for names in (pair, pair[::-1]))
            assert (one.terms, one.refine) == (two.terms, two.refine), pair
    terms = assemble({"name": "fedgala+fedcm+scaffold+fedprox"}, {}).terms
    assert list(map(part_name, terms)) == ["proximal", "drift_correction", "client_momentum", "gradient_alignment"]
    added = ["server_average", "ensemble_distillation", "server_step", "fed_avg_m"]
    refine = assemble({"name": "plan", "add": added}, {}).refine
    expected = ["fed_avg_m", "server_step", "own_rows", "ensemble_distillation", "server_average"]
    assert list(map(part_name, refine)) == expected
