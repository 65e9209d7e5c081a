"""Median, trimmed mean and private mean: numbers worked out by hand, and a client that sends a false model."""

import math

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import numbers, run_small, small_experiment
from test_replies import VICTIM, reply_with

from fedsim.common.errors import UserError
from strategies.fuse.coordinate_median import CoordinateMedian
from strategies.fuse.private_mean import PrivateMean, clipped, clipping
from strategies.fuse.trimmed_mean import TrimmedMean, trimmed_mean
from strategies.parts import ServerRound, Update


def states(*columns):
    """One state per column of numbers, with a counter beside the weights."""
    return [
        {"w": np.array(column, np.float32), "n": np.array(min(int(max(column)), 10**6), np.int64)} for column in columns
    ]


def updates(*columns):
    """The same as checked replies of the clients a, b, c, ..."""
    return [Update("abcdefg"[place], 10, state) for place, state in enumerate(states(*columns))]


def server(previous=None):
    """A round as the strategy prepares it."""
    return ServerRound(1, 3, [], previous or {}, {})


def test_median_by_hand():
    """For three clients it is the middle value of each coordinate, for four the mean of the two in the middle."""
    three = CoordinateMedian().fuse(updates([1, 9], [2, -5], [100, 3]), {}, server())
    assert three["w"].tolist() == [2, 3]
    assert three["n"] == 9  # of 9, 2 and 100
    four = CoordinateMedian().fuse(updates([1, 0], [2, 0], [4, 0], [1000, 0]), {}, server())
    assert four["w"].tolist() == [3, 0]
    assert four["n"] == 2  # the lower median: a count that a client really has
    assert four["w"].dtype == np.float32
    assert four["n"].dtype == np.int64


def test_trimmed_mean_by_hand():
    """Five clients and beta 0.2: the smallest and the largest are left out, the mean of the other three remains."""
    five = updates([1, 5], [2, 4], [3, 3], [6, 2], [1e30, -1e30])
    result = TrimmedMean(0.2).fuse(five, {}, server())
    assert result["w"].tolist() == [np.float32(11 / 3), 3]
    assert result["w"].tolist() == trimmed_mean(states([1, 5], [2, 4], [3, 3], [6, 2], [1e30, -1e30]), 1)["w"].tolist()


def test_trimmed_mean_reduces_to_mean_and_median():
    """If nothing is left out it is the mean; if all but the middle is left out, the median."""
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
    assert clipping(long, reference, 5.0) == 1.0
    assert clipping(reference, reference, 1.0) == 1.0
    assert clipped(long["a"], reference["a"], 1.0).item() == 4.0


def test_private_mean_by_hand():
    """Without noise: the mean of clipped updates. With noise: its standard deviation is z C / K."""
    previous = {"w": np.zeros(2, np.float32)}
    replies = [Update("a", 1, {"w": np.array([3, 4], np.float32)}), Update("b", 1000, {"w": np.zeros(2, np.float32)})]
    quiet = PrivateMean(clip=1.0, noise=0.0).fuse(replies, {}, server(previous))
    np.testing.assert_allclose(quiet["w"], [0.3, 0.4], rtol=1e-6)
    wide = {"w": np.zeros(40_000, np.float32)}
    noisy = [PrivateMean(clip=2.0, noise=3.0).fuse([Update(c, 1, wide) for c in "abc"], {}, server(wide)) for _ in "12"]
    for result in noisy:
        assert abs(result["w"].std() - 3.0 * 2.0 / 3) < 5 * 2.0 / math.sqrt(2 * 40_000)
    assert not np.array_equal(noisy[0]["w"], noisy[1]["w"])  # not from a seed that others know


def lies(message, reply):
    """The victim sends its model times -50, which is finite and has the right shape."""

    def change(arrays, metrics, echo):
        for name, array in arrays.items():
            if array.dtype.kind == "f" and "running_var" not in name:
                arrays[name] = array * np.float32(-50)

    config = message.content.config_records["config"]
    hit = message.metadata.message_type == "train" and config["client"] == VICTIM
    return reply_with(message, reply, change) if hit else reply


@pytest.mark.parametrize("fuse", ["coordinate_median", "trimmed_mean"])
def test_one_liar_of_three_does_not_decide(fuse, tmp_path):
    """The mean follows the false model; median and trimmed mean stay near those of the honest clients.

    The limit for updates is off here, because it would refuse the false model before the fusion.
    """
    largest = {}
    for name in ("weighted_mean", fuse):
        experiment = small_experiment(
            tmp_path / name, {"name": "fedavg", "fuse": name}, train={"rounds": 2}, run={"update_limit": 0.0}
        )
        folder, _ = run_small(experiment, tamper=lies)
        weights = load_file(folder / "last.safetensors")["head.weight"]
        largest[name] = float(np.abs(weights).max())
    assert largest["weighted_mean"] > 5 * largest[fuse]
    assert largest[fuse] < 2.0


def test_weights_are_said_to_be_equal(tmp_path):
    """clients.csv shows the weights that were used."""
    folder, _ = run_small(small_experiment(tmp_path, {"name": "fedavg", "fuse": "coordinate_median"}))
    assert set(numbers(folder / "clients.csv")["weight"].dropna()) == {1 / 3}


def test_private_mean_without_noise_is_the_uniform_mean(tmp_path):
    """With little noise it still learns."""
    model = {"backbone": "digits-cnn"}
    plain, _ = run_small(small_experiment(tmp_path / "a", {"name": "fedavg", "weights": "uniform"}, model=model))
    method = {"name": "fedavg", "fuse": "private_mean", "private_mean": {"clip": 1e6, "noise": 0.0}}
    private, _ = run_small(small_experiment(tmp_path / "b", method, model=model))
    a, b = (load_file(folder / "last.safetensors") for folder in (plain, private))
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "model", "said"),
    [
        ({"fuse": "trimmed_mean", "trimmed_mean": {"beta": 0.2}}, {}, "leaves out none of 3 clients"),
        ({"fuse": "trimmed_mean", "trimmed_mean": {"beta": 0.5}}, {}, "less than 0.5"),
        ({"fuse": "private_mean", "private_mean": {"clip": 0}}, {}, "greater than 0"),
        ({"fuse": "private_mean"}, {}, "batch-norm"),
        (
            {"fuse": "coordinate_median", "weights": "generalization_adjustment"},
            {},
            "not hold with coordinate_median",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(method, model, said, tmp_path):
    """It is refused in one line, before anything starts."""
    with pytest.raises(UserError, match=said):
        run_small(small_experiment(tmp_path, {"name": "fedavg", **method}, model=model))
