"""Tensors that are no images are standardized by sums of the sources, on numbers that were worked out by hand."""

import numpy as np
import pytest
import torch

from fedsim.data.augment import Scaler
from fedsim.data.row import Benchmark
from fedsim.data.scaling import Moments, Scale, moments_of, scale_of, scale_rule, scaled_by_site
from fedsim.settings import DataSettings

NAN = float("nan")
A = np.array([[1, 10, 0], [3, NAN, 1]], np.float32)  # a client of two rows; the third column is no number to scale
B = np.array([[5, 30, 1]], np.float32)


def test_sums_of_clients_give_mean_and_deviation_of_all_their_rows():
    """Column 1: 1, 3, 5 with mean 3 and variance (1 + 9 + 25) / 3 - 9 = 8/3; column 2: 10, 30 with 20 and 100."""
    assert moments_of(A, 2) == Moments((2, 1), (4.0, 10.0), (10.0, 100.0))
    assert moments_of(B, 2) == Moments((1, 1), (5.0, 30.0), (25.0, 900.0))
    scale = scale_of([moments_of(A, 2), moments_of(B, 2)])
    assert scale.mean == (3.0, 20.0)
    assert scale.std == pytest.approx(((8 / 3) ** 0.5, 10.0))


def test_a_missing_value_becomes_the_mean_and_other_columns_stay():
    scale = Scale((3.0, 20.0), (2.0, 10.0))
    assert scale.apply(A).tolist() == [[-1, -1, 0], [0, 0, 1]]
    scaler = Scaler((3,), waits=True)
    with pytest.raises(RuntimeError, match="not known before the handshake"):
        scaler(torch.from_numpy(A))
    scaler.use(scale)
    assert scaler(torch.from_numpy(A)).numpy().tobytes() == scale.apply(A).tobytes()
    assert Scaler((3,), waits=False)(torch.from_numpy(B)).tolist() == B.tolist()


def test_a_signal_is_standardized_by_channel():
    """Channel 1 has 0, 2, 4, 6 with mean 3 and variance 14 - 9 = 5; channel 2 is constant, so that it is only moved."""
    signals = np.array([[[0, 2], [7, 7]], [[4, 6], [7, 7]]], np.float32)
    scale = scale_of([moments_of(signals, 2)])
    assert (scale.mean, scale.std) == ((3.0, 7.0), (pytest.approx(5**0.5), 1.0))
    assert scale.apply(signals)[:, 1].tolist() == [[0, 0], [0, 0]]
    assert scale.apply(signals)[0, 0] == pytest.approx([-3 / 5**0.5, -1 / 5**0.5])


def test_a_column_that_is_empty_everywhere_becomes_zero():
    empty = np.array([[NAN], [NAN]], np.float32)
    scale = scale_of([moments_of(empty, 1)])
    assert scale.apply(empty).tolist() == [[0], [0]]


def test_a_large_constant_is_no_variance():
    assert scale_of([moments_of(np.full((3, 1), 1e6 + 0.1, np.float32), 1)]).std == (1.0,)


def test_a_site_is_scaled_by_its_own_rows():
    bench = Benchmark("x", "X", ("a", "b"), ("0", "1"), 1, shape=(3,), numeric=2)
    values = np.array([[1, 10, 0], [3, NAN, 1], [100, 0, 0]], np.float32)
    scaled = scaled_by_site(values, np.array([0, 1]), bench)  # means 2 and 10; deviations 1, and 1 for one value
    assert scaled.tolist() == [[-1, 0, 0], [1, 0, 1], [98, -10, 0]]


def test_what_scales_a_data_set():
    row = Benchmark("x", "X", (), (), 1, shape=(3,), numeric=3)
    signal = Benchmark("x", "X", (), (), 1, shape=(3, 8), numeric=3)
    assert scale_rule(DataSettings(), Benchmark("x", "X", (), (), 1)) == "none"
    assert [scale_rule(DataSettings(), bench) for bench in (row, signal)] == ["federated", "none"]
    assert scale_rule(DataSettings(dataset="arrays", scale="site"), signal) == "site"


@pytest.mark.parametrize(
    "moments",
    [
        Moments((1,), (1.0, 2.0), (1.0, 4.0)),
        Moments((1,), (float("inf"),), (1.0,)),
        Moments((2,), (4.0,), (1.0,)),  # two values with the sum 4 have at least 8 as their sum of squares
        Moments((-1,), (0.0,), (0.0,)),
    ],
)
def test_numbers_that_cannot_be_sums_are_noticed(moments):
    assert not moments.is_valid
    assert Moments((2,), (4.0,), (8.0,)).is_valid
