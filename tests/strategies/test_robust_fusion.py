"""RFA, centered clipping and tilted weights on numbers worked out by hand."""

import numpy as np
import pytest
from replies import replies, uniform

from strategies.fuse.centered_clipping import CenteredClipping
from strategies.fuse.geometric_median import GeometricMedian, median_shares
from strategies.parts import RefusedUpdateError, ServerRound, Update
from strategies.weights.tilted import Tilted


def close(found, expected, atol=1.5e-6):
    np.testing.assert_allclose(found, expected, atol=atol, rtol=0)


FAR = ((0, 0), (1, 0), (0, 1), (10, 10))


@pytest.mark.parametrize(("iterations", "expected"), [
    (0, 2.75), (1, 1.3241696652), (2, 0.7435841867), (3, 0.5700945035), (4, 0.5223976248), (100, 0.5),
])  # fmt: skip
def test_the_geometric_median_leaves_a_point_far_away(iterations, expected):
    """The point at (10, 10) pulls the mean to 2.75; the iterations end at .5. Buffers have the same shares."""
    updates, server = replies(*FAR)
    fused = GeometricMedian(iterations=iterations, tolerance=0.0).fuse(updates, uniform(updates), server)
    close(fused["w"], (expected, expected), 1e-5)
    shares = [server.client_columns[update.client]["weight"] for update in updates]
    close(sum(shares), 1)
    close(fused["mean"], [np.dot(shares, (0, 10, 20, 30))], 1e-5)
    assert fused["count"] == 4


def test_one_norm_over_all_tensors_and_weights_of_the_recipe():
    """Points (0,0|0), (1,0|1), (0,2|0), (9,9|9) in two tensors. With weights (.7, .3), the first of two points wins."""
    points = ((0, 0, 0), (1, 0, 1), (0, 2, 0), (9, 9, 9))
    arrays = [{"a": np.float32(point[:2]), "b": np.float32(point[2:])} for point in points]
    updates = [Update(name, 10, each) for name, each in zip("abcd", arrays)]
    start = {"a": np.zeros(2, np.float32), "b": np.zeros(1, np.float32)}
    server = ServerRound(1, 4, list("abcd"), start, updates=updates, parameters=frozenset("ab"))
    fused = GeometricMedian().fuse(updates, uniform(updates), server)
    close((*fused["a"], *fused["b"]), (0.645144, 0.782886, 0.645144))
    shares = [server.client_columns[name]["weight"] for name in "abcd"]
    close(shares, (0.307146, 0.397657, 0.267699, 0.027499))
    line = np.array([[0.0, 0.0], [0.0, 1.0]])  # points 0 and 1; from .3: .7/.3 and .3/.7, so that the mean is 9/58
    close(median_shares(line, np.array([0.7, 0.3]), 1, 1e-5, 0.0), (49 / 58, 9 / 58))


def test_the_median_stops_early_and_no_distance_is_0():
    """At a point itself its distance is 0, which `nu` replaces: the point takes nearly all weight."""
    same = np.zeros((3, 3))
    close(median_shares(same, np.full(3, 1 / 3), 4, 1e-5, 1e-6), (1 / 3,) * 3)
    points = np.array([(0.0,), (-1.0,), (1.0,)])  # the mean is the first point: 1e5 of weight against 1 and 1
    found = median_shares(points @ points.T, np.full(3, 1 / 3), 1, 1e-5, 0.0)
    close(found, np.array((1e5, 1, 1)) / (1e5 + 2), 1e-9)
    square = np.array(FAR) @ np.array(FAR).T
    quarter = np.full(4, 0.25)
    assert np.array_equal(median_shares(square, quarter, 9, 1e-5, 10.0), median_shares(square, quarter, 1, 1e-5, 0.0))


def test_centered_clipping_by_hand():
    """tau 10: the move (30, 40) of length 50 counts as (6, 8). Round 2 begins at v = (7/3, 10/3)."""
    updates, server = replies((1, 0), (0, 2), (30, 40))
    part = CenteredClipping(tau=10, unit="absolute")
    fused = part.fuse(updates, {}, server)
    close(fused["w"], (7 / 3, 10 / 3))
    close(fused["mean"], [10.0])  # the median of 0, 10, 20
    assert [server.client_columns[name]["weight"] for name in "abc"] == [1 / 3] * 3
    fused = part.fuse(updates, {}, server)
    v = np.array((7 / 3, 10 / 3))
    apart = np.array(((1, 0), (0, 2), (30, 40))) - v
    steps = [each * min(1, 10 / np.linalg.norm(each)) for each in apart]
    close(fused["w"], v + np.mean(steps, axis=0))
    close(server.arrays["w"], fused["w"])


def test_the_radius_in_median_lengths_and_several_iterations():
    """Lengths 1, 2, 50: the median is 2, so that (30, 40) counts as (1.2, 1.6). Two iterations clip around the first v.
    A huge radius gives the plain mean."""
    updates, server = replies((1, 0), (0, 2), (30, 40))
    close(CenteredClipping().fuse(updates, {}, server)["w"], (2.2 / 3, 3.6 / 3))
    updates, server = replies((1, 0), (0, 2), (30, 40))
    close(CenteredClipping(tau=1e6).fuse(updates, {}, server)["w"], (31 / 3, 14))
    updates, server = replies((1,), (-1,), (9,))
    fused = CenteredClipping(tau=2, unit="absolute", iterations=2).fuse(updates, {}, server)
    close(fused["w"], [2 / 3 + (1 / 3 - 5 / 3 + 2) / 3])  # v = 2/3; then 1/3, -5/3 and 2


def tilt(t, losses, counts, delivered="abc"):
    metrics = [{"received_loss": loss} for loss in losses]
    updates, server = replies((0,), (0,), (0,), metrics=metrics)
    for update, count in zip(updates, counts):
        update.examples = count
    updates = [update for update in updates if update.client in delivered]
    return list(Tilted(t).weigh(updates, server).values())


def test_tilted_weights_by_hand():
    """F = (.5, 1, 2), p = (.5, .3, .2): .5 e^.5, .3 e, .2 e^2 at t 1. t = 0 is FedAvg; large losses do not overflow."""
    close(tilt(1.0, (0.5, 1, 2), (5, 3, 2)), (0.264417, 0.261570, 0.474013))
    close(tilt(0.0, (0.5, 1, 2), (5, 3, 2)), (0.5, 0.3, 0.2), 1e-12)
    close(tilt(-1.0, (0.5, 1, 2), (5, 3, 2)), (0.688150, 0.250431, 0.061419))
    close(tilt(2.0, (1000, 0, 1000), (1, 1, 3)), (0.25, 0, 0.75), 1e-12)
    close(tilt(1.0, (np.log(2), np.log(4), 0), (1, 1, 1), "ab"), (1 / 3, 2 / 3), 1e-12)
    with pytest.raises(RefusedUpdateError, match="received_loss"):
        tilt(1.0, (), (1, 1, 1))
