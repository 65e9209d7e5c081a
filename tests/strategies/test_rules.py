"""FedGMA, AFL, FedNova, FedGaLA, FedDyn, FedCM and FedOMG on numbers worked out by hand, and the order of parts."""

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
from strategies.fuse.gradient_matching import GradientMatching
from strategies.fuse.normalized_average import NormalizedAverage
from strategies.fuse.semantic_divergence import SemanticDivergence
from strategies.fuse.weighted_mean import WeightedMean
from strategies.parts import RefusedUpdateError, ServerRound, Update
from strategies.refine.dynamic_correction import DynamicCorrection
from strategies.tools.moves import gram
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


ORTHOGONAL, CONFLICTING = ((1, 0), (0, 1)), ((2, 0), (-1, 1))
THREE = ((1, 0, 0), (0, 1, 0), (-1, -1, 1))


def matched(deltas, **settings):
    deltas = [{"w": np.array(delta, float)} for delta in deltas]
    gamma, a = GradientMatching(**settings).solve(gram(deltas))
    return gamma, a, sum(share * delta["w"] for share, delta in zip(a, deltas))


@pytest.mark.parametrize(("moves", "settings", "gamma", "direction", "atol"), [
    (ORTHOGONAL, {}, (0.5, 0.5), (0.599972, 0.599972), 1.5e-6),  # 1.2 times as long as the mean
    (CONFLICTING, {}, (0.000064, 0.999936), (0.199993, 0.600032), 1.5e-6),
    (CONFLICTING, {"solver": "exact"}, (0, 1), (0.2, 0.6), 1e-5),
    (CONFLICTING, {"solver": "exact", "rescale": False}, (0, 1), (0.25, 0.75), 1e-5),
    (THREE, {}, (0.483622, 0.483622, 0.032757), (0.094186, 0.094186, 0.273510), 1.5e-6),
    (THREE, {"solver": "exact"}, (0.468609, 0.468609, 0.062782), (0.093722, 0.093722, 0.281165), 2e-4),
    ([(1, 2)] * 3, {}, (1 / 3,) * 3, (1.19996, 2.39992), 6e-6),
    ([(1, 2)] * 3, {"solver": "exact"}, (1 / 3,) * 3, (1.2, 2.4), 1e-6),
])  # fmt: skip
def test_matching_by_hand(moves, settings, gamma, direction, atol):
    """Of two moves there is no conflict any more; of three the smallest inner product rises from 0 to .085."""
    found, _, g = matched(moves, **settings)
    close(found, gamma, atol)
    close(g, direction, atol)
    close(matched(moves, **settings, c=0.0)[2], np.mean(moves, axis=0))


def test_matching_keeps_order_and_scale_and_has_no_nan():
    """The mean of the inner products is 0 but for rounding; no number of the result is NaN."""
    gamma, _, _ = matched(THREE)
    close(matched([THREE[2], THREE[0], THREE[1]])[0], gamma[[2, 0, 1]], 1e-12)
    g, scaled = (matched(factor * np.array(CONFLICTING), relative_eps=True)[2] for factor in (1, 7))
    close(scaled, 7 * g, 1e-12)
    gamma, a, _ = matched(0.01 * np.array(CONFLICTING))
    close(gamma, (0.000788, 0.999212))
    close(a, (0.400158, 0.600189))
    cancelling = np.array([[1.0, -1.0 - 1e-12], [-1.0 - 1e-12, 1.0]])
    for solver in ("descent", "exact"):
        assert np.isfinite(np.concatenate(GradientMatching(solver=solver).solve(cancelling))).all()
    with pytest.raises(UserError, match="c is 1; solver = 'exact' needs less"):
        GradientMatching(solver="exact", c=1.0).check(None)
    GradientMatching(solver="exact", c=0.99).check(None)
    GradientMatching(c=1.0).check(None)
    updates, server = replies(*CONFLICTING, start=1.0)
    weights = {"a": 0.25, "b": 0.75}
    fused = GradientMatching().fuse(updates, weights, server)
    close(fused["w"], (1.199993, 1.600032))
    close(fused["mean"], [7.5])
    assert server.client_columns["b"]["weight"] == pytest.approx(0.600032, abs=1e-6)
    official = GradientMatching(variant="official").fuse(updates, weights, server)
    close(official["w"] - 1, 0.5 * matched([(0.5, 0), (-0.75, 0.75)])[2], 1e-6)


@pytest.mark.parametrize(("variant", "mean"), [("default", 6.0), ("official", 0.0)])
def test_matching_leaves_what_is_only_uploaded_to_the_mean(variant, mean):
    """Personal tensors, which no client loads, are averaged: .25 times 3 and .75 times 7 give 6. `official` puts back
    the buffers that the clients share, and no others."""
    buffers = ("bn.weight", "bn.mean", "mean")
    updates, server = replies(*CONFLICTING)
    server.previous |= dict.fromkeys(buffers, np.zeros(2, np.float32))
    server.places = {"w": "shared", "bn.weight": "upload", "bn.mean": "upload", "mean": "shared", "count": "shared"}
    for update, value in zip(updates, (3, 7)):
        update.arrays |= dict.fromkeys(buffers, np.full(2, value, np.float32))
    fused = GradientMatching(variant=variant).fuse(updates, {"a": 0.25, "b": 0.75}, server)
    assert fused["bn.weight"].tolist() == fused["bn.mean"].tolist() == [6.0, 6.0]
    assert fused["mean"].tolist() == [mean, mean]
    assert fused["w"].any()


def test_what_is_recorded(caplog):
    """How far direction and mean agree with the move that suits them least. Lengths of moves, in details.csv and in the
    warning, which comes once, are the moves' own, also where a weight multiplies them."""
    updates, server = replies(*CONFLICTING)
    fused = GradientMatching().fuse(updates, uniform(updates), server)
    found = {row["name"]: row["value"] for row in server.details if row["quantity"] == "least_inner_product"}
    assert found == pytest.approx({"direction": min(np.array(CONFLICTING) @ fused["w"]), "mean": 0.0}, abs=1e-6)
    updates, server = replies((0.06, 0), (0, 0.06))
    for _ in range(2):
        GradientMatching(scale="weights").fuse(updates, uniform(updates), server)
    lengths = [row["value"] for row in server.details if row["quantity"] == "move_length"]
    assert lengths == pytest.approx([0.06] * 4)
    assert caplog.text.count("moves are 0.06 long on average, and are multiplied") == 1
    assert caplog.text.count("relative_eps") == 1


@pytest.mark.parametrize("moves", [[(1, 0)], [(0, 0), (0, 0)]], ids=["one client", "no move"])
def test_rounds_without_a_direction_are_fedavg_and_say_so_once(moves):
    updates, server = replies(*moves)
    for _ in range(2):
        fused = GradientMatching().fuse(updates, uniform(updates), server)
    assert np.array_equal(fused["w"], WeightedMean().fuse(updates, uniform(updates), server)["w"])
    assert [note.count("no direction") for note in server.notes] == [1]
    assert not server.details
