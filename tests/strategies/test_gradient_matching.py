"""FedOMG's fusion on numbers worked out by hand."""

import numpy as np
import pytest
from replies import replies, uniform

from fedsim.common.errors import UserError
from strategies.fuse.gradient_matching import GradientMatching
from strategies.fuse.weighted_mean import WeightedMean
from strategies.tools.moves import gram

ORTHOGONAL, CONFLICTING = ((1, 0), (0, 1)), ((2, 0), (-1, 1))
THREE = ((1, 0, 0), (0, 1, 0), (-1, -1, 1))


def matched(deltas, **settings):
    deltas = [{"w": np.array(delta, float)} for delta in deltas]
    gamma, a = GradientMatching(**settings).solve(gram(deltas))
    return gamma, a, sum(share * delta["w"] for share, delta in zip(a, deltas))


def close(found, expected, atol=1.5e-6):
    np.testing.assert_allclose(found, expected, atol=atol, rtol=0)


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


def test_matching_moves_parameters_and_averages_buffers():
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
