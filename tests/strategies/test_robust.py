"""Median, trimmed mean and private mean: numbers worked out by hand, and a client that sends a false model."""

import math

import numpy as np
import pytest
from support import run_small, small_experiment

from fedsim.common.errors import UserError
from strategies.fuse.coordinate_median import CoordinateMedian
from strategies.fuse.private_mean import PrivateMean, clipped, clipping
from strategies.fuse.trimmed_mean import TrimmedMean, trimmed_mean
from strategies.parts import ServerRound, Update


def states(*columns):
    return [
        {"w": np.array(column, np.float32), "n": np.array(min(int(max(column)), 10**6), np.int64)} for column in columns
    ]


def updates(*columns):
    return [Update("abcdefg"[place], 10, state) for place, state in enumerate(states(*columns))]


def server(previous=None):
    return ServerRound(1, 3, [], previous or {}, {})


def test_median_by_hand():
    three = CoordinateMedian().fuse(updates([1, 9], [2, -5], [100, 3]), {}, server())
    assert three["w"].tolist() == [2, 3]
    assert three["n"] == 9  # of 9, 2 and 100
    four = CoordinateMedian().fuse(updates([1, 0], [2, 0], [4, 0], [1000, 0]), {}, server())
    assert four["w"].tolist() == [3, 0]
    assert four["n"] == 2  # the lower median: a count that a client really has
    assert (four["w"].dtype, four["n"].dtype) == (np.float32, np.int64)
    seen = server()
    CoordinateMedian().fuse(updates([1], [2]), {}, seen)
    assert seen.client_columns == {"a": {"weight": 0.5}, "b": {"weight": 0.5}}


def test_trimmed_mean_by_hand():
    """Five clients and beta 0.2: the smallest and the largest are left out, the mean of the other three remains."""
    five = updates([1, 5], [2, 4], [3, 3], [6, 2], [1e30, -1e30])
    assert TrimmedMean(0.2).fuse(five, {}, server())["w"].tolist() == [np.float32(11 / 3), 3]


def test_trimmed_mean_reduces_to_mean_and_median():
    rng = np.random.default_rng(0)
    models = [{"w": rng.normal(size=(4, 3)).astype(np.float32)} for _ in range(5)]
    stacked = np.stack([model["w"] for model in models])
    np.testing.assert_allclose(trimmed_mean(models, 0)["w"], stacked.mean(0), rtol=1e-6)
    np.testing.assert_array_equal(trimmed_mean(models, 2)["w"], np.median(stacked, axis=0))
    with pytest.raises(ValueError, match="3 of 5 values"):
        trimmed_mean(models, 3)


def test_clipping_by_hand():
    """An update (3, 4) of norm 5, clipped to 2.5, is halved; a short one stays."""
    reference = {"a": np.array([1.0], np.float32), "b": np.array([1.0], np.float32)}
    long = {"a": np.array([4.0], np.float32), "b": np.array([5.0], np.float32)}
    assert clipping(long, reference, 2.5) == 0.5
    assert {name: clipped(long[name], reference[name], 0.5).item() for name in "ab"} == {"a": 2.5, "b": 3.0}
    assert clipping(long, reference, 5.0) == clipping(long, reference, 9.0) == 1.0
    assert clipping(reference, reference, 1.0) == 1.0
    assert clipped(long["a"], reference["a"], 1.0).item() == 4.0


def test_private_mean_by_hand():
    """Without noise: the mean of clipped updates, (3, 4) to length 1. With noise: its standard deviation is z C / K."""
    previous = {"w": np.zeros(2, np.float32)}
    replies = [Update("a", 1, {"w": np.array([3, 4], np.float32)}), Update("b", 1000, {"w": np.zeros(2, np.float32)})]
    quiet = PrivateMean(clip=1.0, noise=0.0).fuse(replies, {}, server(previous))
    np.testing.assert_allclose(quiet["w"], [0.3, 0.4], rtol=1e-6)
    wide = {"w": np.zeros(40_000, np.float32)}
    noisy = [PrivateMean(clip=2.0, noise=3.0).fuse([Update(c, 1, wide) for c in "abc"], {}, server(wide)) for _ in "12"]
    for result in noisy:
        assert abs(result["w"].std() - 3.0 * 2.0 / 3) < 5 * 2.0 / math.sqrt(2 * 40_000)
    assert not np.array_equal(noisy[0]["w"], noisy[1]["w"])  # not from a seed that others know


@pytest.mark.parametrize("part", [CoordinateMedian(), TrimmedMean(0.34)])
def test_one_liar_of_three_does_not_decide(part):
    """A client sends its model times -50, which is finite and has the right shape."""
    honest, liar = np.array([[0.9, 1.1], [1.0, 1.0]]), [-50.0, -55.0]
    fused = part.fuse(updates(*honest.tolist(), liar), {}, server())["w"]
    assert (np.abs(fused - honest.mean(0)) < 0.2).all()


@pytest.mark.parametrize(("method", "said"), [
    ({"fuse": "trimmed_mean", "trimmed_mean": {"beta": 0.2}}, "leaves out none of 3 clients"),
    ({"fuse": "trimmed_mean", "trimmed_mean": {"beta": 0.5}}, "less than 0.5"),
    ({"fuse": "private_mean", "private_mean": {"clip": 0}}, "greater than 0"),
    ({"fuse": "private_mean"}, "batch-norm"),
    ({"fuse": "coordinate_median", "weights": "generalization_adjustment"}, "not hold with coordinate_median"),
    ({"add": ["server_step"], "server_step": {"eta": 0}}, r"method\.server_step.eta: Input should be greater than 0"),
    ({"add": ["server_average"], "server_average": {"beta": 1.0}}, "Input should be less than 1"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(method, said, tmp_path):
    """It is refused in one line, before anything starts."""
    with pytest.raises(UserError, match=said):
        run_small(small_experiment(tmp_path, {"name": "fedavg", **method}))
