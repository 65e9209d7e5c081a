import numpy as np
import pytest

from strategies import aggregate
from strategies.aggregate import divergence_coefficients, project_simplex, tensorwise_mean, weighted_mean


def random_state(rng):
    return {
        "conv.weight": rng.normal(size=(7, 3, 3)).astype(np.float32),
        "bn.num_batches_tracked": np.array(rng.integers(2**40), dtype=np.int64),
        "scalar": np.array(rng.normal(), dtype=np.float64),
        "half": rng.normal(size=4).astype(np.float16),
        "empty": np.zeros((0, 2), np.float32),
        "mask": rng.random(3) > 0.5,
        "fc.weight": rng.normal(size=(5, 50_001)).astype(np.float32),
    }


def vectors(*values):
    return [{"w": np.atleast_1d(np.array(value, dtype=np.float64))} for value in values]


@pytest.mark.parametrize("clients", [3, 20])
def test_weighted_mean_equals_the_plain_formula(clients):
    states = [random_state(np.random.default_rng(k)) for k in range(clients)]
    weights = np.random.default_rng(9).random(clients)
    mean = weighted_mean(states, weights)
    assert list(mean) == list(states[0])
    for name, array in states[0].items():
        assert (mean[name].shape, mean[name].dtype) == (array.shape, array.dtype)
        if array.dtype.kind == "f":
            expected = sum(p * state[name].astype(np.float64) for p, state in zip(weights / weights.sum(), states))
            np.testing.assert_allclose(mean[name], expected, rtol=1e-6 if array.dtype != np.float16 else 1e-3)


def test_integers_take_the_maximum_sums_are_in_float64_and_one_client_is_returned_bitwise():
    states = [{"n": np.array(n), "m": np.array([n, -n])} for n in (3, 2**60 + 1, 5)]
    mean = weighted_mean(states, [0.2, 0.3, 0.5])
    assert (mean["n"], mean["n"].dtype, mean["n"].shape) == (2**60 + 1, np.int64, ())
    np.testing.assert_array_equal(mean["m"], [2**60 + 1, -3])
    states = [{"w": np.float32([value])} for value in (2.0**24, 1.0, 1.0)]
    assert weighted_mean(states, [1, 1, 1])["w"] == np.float32((2.0**24 + 2) / 3)
    state = {"w": np.array([-0.0, 1e-45, 3.1], np.float32), "n": np.array(7)}
    mean = weighted_mean([state], [0.3])
    assert all(mean[name].tobytes() == array.tobytes() for name, array in state.items())
    assert not np.shares_memory(mean["w"], state["w"])


def test_same_bits_whatever_the_key_order_threads_and_repetition(monkeypatch):
    states = [random_state(np.random.default_rng(k)) for k in range(20)]
    weights = np.random.default_rng(1).random(20)
    first = weighted_mean(states, weights)
    again = weighted_mean([dict(reversed(state.items())) for state in states], weights)
    monkeypatch.setattr(aggregate, "THREADS", 1)
    single = weighted_mean(states, weights)
    for name, array in first.items():
        assert array.tobytes() == again[name].tobytes() == single[name].tobytes()


@pytest.mark.parametrize(("refused", "match"), [
    *((lambda other=other: weighted_mean([*vectors(1), other], [1, 1]), match) for other, match in (
        ({}, "w"), ({**vectors(2)[0], "extra": np.zeros(1)}, "extra"), ({"w": np.zeros(2)}, "w"),
        ({"w": np.zeros(1, np.float32)}, "w"))),
    *((lambda own=weights: weighted_mean(vectors(1, 2), own), "weights")
      for weights in ([1], [1, -1], [0, 0], [1, np.nan], [1, np.inf])),
    (lambda: weighted_mean([], []), "no client"),
    (lambda: weighted_mean([{"name": np.array(["x"])}] * 2, [1, 1]), "name"),
    (lambda: tensorwise_mean([{"a": np.ones(1), "b": np.ones(1)}], {"a": [1]}), "'b'"),
    (lambda: divergence_coefficients(vectors(1, 2), "cosion"), "unknown"),
    (lambda: divergence_coefficients(vectors(1, 2), strategy="far"), "unknown"),
    (lambda: divergence_coefficients([{"a": np.ones(1), "m.bias": np.ones(1)}], groups={"a": "m"}), "m.bias"),
    *((lambda own=bad: project_simplex(own), "project_simplex") for bad in ([], [np.nan, 1.0], [[1.0]])),
])  # fmt: skip
def test_what_cannot_be_computed_is_refused(refused, match):
    with pytest.raises(ValueError, match=match):
        refused()


@pytest.mark.parametrize(("models", "settings", "expected"), [
    (([0, 0], [0, 0], [3, 4]), {}, [0.25, 0.25, 0.5]), ((-1, 0, 1), {}, [0.5, 0, 0.5]),
    *((([0, 7], [3, -4]), {"metric": metric}, [0.5, 0.5]) for metric in ("l1", "l2")), (([3, 4],), {}, [1]),
    # the average is [1, 2]
    (([0, 0], [0, 0], [3, 6]), {"metric": "l1"}, [0.25, 0.25, 0.5]),
    (([0, 0], [0, 0], [3, 6]), {"metric": "cosine"}, [0.5, 0.5, 0.0]),
    (([0, 0], [0, 0], [3, 6]), {"strategy": "similarity"}, [0.4, 0.4, 0.2]),
    (([0, 0], [0, 0], [3, 6]), {"strategy": "average"}, [1 / 3] * 3),
    (([1, 0], [0, 1], [1, 1]), {"metric": "cosine"}, [0.5, 0.5, 0.0]),  # average [2, 2]/3: 1 - 1/sqrt(2) twice, then 0
    (([0, 0], [1, 0], [1, 0]), {"metric": "cosine"}, [1.0, 0.0, 0.0]),  # 1 - cos is 1 for a model of zeros
    *(([value] * 3, {"metric": metric}, [1 / 3] * 3)
      for metric in ("l1", "l2", "cosine") for value in ([0.0, 0.0], [1e6, 0.1])),
])  # fmt: skip
def test_divergence_coefficients_by_hand(models, settings, expected):
    coefficients = divergence_coefficients(vectors(*models), **settings)
    np.testing.assert_allclose(coefficients["w"], expected, atol=1e-12)
    mean = np.tensordot(expected, np.array(models, float), 1)
    np.testing.assert_allclose(tensorwise_mean(vectors(*models), coefficients)["w"], np.atleast_1d(mean), atol=1e-9)


@pytest.mark.parametrize(("vector", "expected"), [
    # agnostic federated learning: 1/3 + gamma (1, 2, 3)
    (1 / 3 + 0.1 * np.array([1.0, 2.0, 3.0]), [0.7 / 3, 1 / 3, 1.3 / 3]),
    (1 / 3 + 0.5 * np.array([1.0, 2.0, 3.0]), [0, 0.25, 0.75]),
    (np.full(3, 4 / 3), [1 / 3] * 3), (np.full(3, 1 / 3), [1 / 3] * 3), ([5.0], [1.0]),
])  # fmt: skip
def test_the_nearest_point_of_the_simplex(vector, expected):
    np.testing.assert_allclose(project_simplex(vector), expected, atol=1e-12)
