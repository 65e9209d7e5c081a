import numpy as np
import pytest

from strategies import aggregate
from strategies.aggregate import divergence_coefficients, project_simplex, tensorwise_mean, weighted_mean

RNG = np.random.default_rng(0)


def random_state(rng, big=False):
    state = {
        "conv.weight": rng.normal(size=(7, 3, 3)).astype(np.float32),
        "bn.running_var": rng.random(5).astype(np.float32),
        "bn.num_batches_tracked": np.array(rng.integers(2**40), dtype=np.int64),
        "scalar": np.array(rng.normal(), dtype=np.float64),
        "half": rng.normal(size=4).astype(np.float16),
        "empty": np.zeros((0, 2), np.float32),
        "mask": rng.random(3) > 0.5,
    }
    if big:
        state["fc.weight"] = rng.normal(size=(5, 50_001)).astype(np.float32)
    return state


def reference_mean(states, weights):
    shares = np.asarray(weights, np.float64) / np.sum(weights)
    return {
        name: sum(p * state[name].astype(np.float64) for p, state in zip(shares, states)).astype(array.dtype)
        for name, array in states[0].items()
        if array.dtype.kind == "f"
    }


def scalars(*values):
    return [{"w": np.array([value], dtype=np.float64)} for value in values]


def vectors(*values):
    return [{"w": np.array(value, dtype=np.float64)} for value in values]


def fuse(states, **options):
    return tensorwise_mean(states, divergence_coefficients(states, **options))["w"]


@pytest.mark.parametrize("clients", [2, 3, 20])
def test_weighted_mean_equals_the_plain_formula(clients):
    states = [random_state(np.random.default_rng(k), big=True) for k in range(clients)]
    weights = np.random.default_rng(9).random(clients)
    mean = weighted_mean(states, weights)
    for name, expected in reference_mean(states, weights).items():
        np.testing.assert_allclose(mean[name], expected, rtol=1e-6 if expected.dtype != np.float16 else 1e-3)
    assert list(mean) == list(states[0])
    assert all(mean[name].shape == a.shape and mean[name].dtype == a.dtype for name, a in states[0].items())


def test_integer_buffers_take_the_maximum_and_keep_their_dtype():
    states = [{"n": np.array(n), "m": np.array([n, -n])} for n in (3, 2**60 + 1, 5)]
    mean = weighted_mean(states, [0.2, 0.3, 0.5])
    assert (mean["n"], mean["n"].dtype, mean["n"].shape) == (2**60 + 1, np.int64, ())
    np.testing.assert_array_equal(mean["m"], [2**60 + 1, -3])


def test_one_client_is_returned_bitwise_in_new_memory():
    state = {"w": np.array([-0.0, 1e-45, 3.1], np.float32), "n": np.array(7)}
    mean = weighted_mean([state], [0.3])
    assert all(mean[name].tobytes() == array.tobytes() for name, array in state.items())
    assert not np.shares_memory(mean["w"], state["w"])


def test_accumulates_in_float64():
    states = [{"w": state["w"].astype(np.float32)} for state in scalars(2.0**24, 1.0, 1.0)]
    assert weighted_mean(states, [1, 1, 1])["w"] == np.float32((2.0**24 + 2) / 3)


@pytest.mark.filterwarnings("error")
def test_reads_read_only_unaligned_and_strided_arrays():
    values = RNG.normal(size=(40, 50)).astype(np.float32)
    unaligned = np.frombuffer(b"\0" * 3 + values.tobytes(), dtype=np.float32, offset=3).reshape(values.shape)
    strided = np.asfortranarray(values)
    assert not unaligned.flags.writeable
    np.testing.assert_array_equal(weighted_mean([{"w": unaligned}, {"w": strided}], [1, 3])["w"], values)


def test_same_bits_whatever_the_key_order_threads_and_repetition(monkeypatch):
    states = [random_state(np.random.default_rng(k), big=True) for k in range(20)]
    weights = np.random.default_rng(1).random(20)
    first = weighted_mean(states, weights)
    again = weighted_mean([dict(reversed(state.items())) for state in states], weights)
    monkeypatch.setattr(aggregate, "THREADS", 1)
    single = weighted_mean(states, weights)
    for name, array in first.items():
        assert array.tobytes() == again[name].tobytes() == single[name].tobytes()


@pytest.mark.parametrize(("change", "match"), [
    (lambda s: s.pop("scalar"), "scalar"),
    (lambda s: s.update(extra=np.zeros(1)), "extra"),
    (lambda s: s.update({"half": s["half"][:2]}), "half"),
    (lambda s: s.update({"conv.weight": s["conv.weight"].astype(np.float64)}), r"conv\.weight"),
])  # fmt: skip
def test_replies_that_differ_are_refused_by_tensor_name(change, match):
    states = [random_state(RNG), random_state(RNG)]
    change(states[1])
    with pytest.raises(ValueError, match=match):
        weighted_mean(states, [1, 1])


@pytest.mark.parametrize(("states", "weights", "match"), [
    *((scalars(1, 2), weights, "weights") for weights in ([1], [1, -1], [0, 0], [1, np.nan], [1, np.inf])),
    ([], [], "no client"),
    ([{"name": np.array(["x"])}] * 2, [1, 1], "name"),
])  # fmt: skip
def test_what_cannot_be_averaged_is_refused(states, weights, match):
    with pytest.raises(ValueError, match=match):
        weighted_mean(states, weights)


def test_tensorwise_mean_weighs_every_tensor_by_itself():
    states = [{"a": np.full(3, k, np.float32), "b": np.full((2, 2), k, np.float32), "n": np.array(k)} for k in range(3)]
    mean = tensorwise_mean(states, {"a": [1, 0, 0], "b": [0, 1, 3]})
    np.testing.assert_array_equal(mean["a"], [0, 0, 0])
    np.testing.assert_array_equal(mean["b"], np.full((2, 2), 1.75))
    assert mean["n"] == 2
    with pytest.raises(ValueError, match="'b'"):
        tensorwise_mean(states, {"a": [1, 1, 1]})


def test_divergence_coefficients_by_hand():
    states = vectors([0, 0], [0, 0], [3, 4])
    np.testing.assert_allclose(divergence_coefficients(states)["w"], [0.25, 0.25, 0.5])
    np.testing.assert_allclose(fuse(states), [1.5, 2.0])
    np.testing.assert_allclose(divergence_coefficients(scalars(0, 1, 5))["w"], [1 / 3, 1 / 6, 1 / 2])
    np.testing.assert_allclose(divergence_coefficients(scalars(-1, 0, 1))["w"], [0.5, 0, 0.5])
    for metric in ("l1", "l2"):
        np.testing.assert_array_equal(divergence_coefficients(vectors([0, 7], [3, -4]), metric)["w"], [0.5, 0.5])
    np.testing.assert_array_equal(divergence_coefficients(vectors([3, 4]))["w"], [1])


@pytest.mark.parametrize("metric", ["l1", "l2", "cosine"])
def test_equal_clients_share_equally(metric):
    for value in ([0.0, 0.0], [1e6, 0.1]):
        np.testing.assert_allclose(divergence_coefficients(vectors(value, value, value), metric)["w"], [1 / 3] * 3)


def test_other_metrics_and_strategies():
    states = vectors([0, 0], [0, 0], [3, 6])  # average [1, 2]
    np.testing.assert_allclose(divergence_coefficients(states, "l1")["w"], [0.25, 0.25, 0.5])
    np.testing.assert_allclose(divergence_coefficients(states, "cosine")["w"], [0.5, 0.5, 0.0], atol=1e-12)
    np.testing.assert_allclose(divergence_coefficients(states, strategy="similarity")["w"], [0.4, 0.4, 0.2])
    np.testing.assert_allclose(divergence_coefficients(states, strategy="average")["w"], [1 / 3] * 3)
    orthogonal = vectors([1, 0], [0, 1], [1, 1])  # average [2, 2]/3: 1 − cos = 1 − 1/√2 twice, then 0
    np.testing.assert_allclose(divergence_coefficients(orthogonal, "cosine")["w"], [0.5, 0.5, 0.0], atol=1e-12)
    one_zero = vectors([0, 0], [1, 0], [1, 0])  # 1 - cos is 1 for a model of zeros
    np.testing.assert_allclose(divergence_coefficients(one_zero, "cosine")["w"], [1.0, 0.0, 0.0], atol=1e-12)
    for bad in ({"metric": "cosion"}, {"strategy": "far"}):
        with pytest.raises(ValueError, match="unknown"):
            divergence_coefficients(states, **bad)


def test_module_granularity_concatenates_the_tensors_of_a_group():
    whole = [RNG.normal(size=6) for _ in range(3)]
    split = [{"m.weight": w[:4].reshape(2, 2), "m.bias": w[4:], "m.count": np.array(k)} for k, w in enumerate(whole)]
    groups = {"m.weight": "m", "m.bias": "m"}
    for metric in ("l2", "l1", "cosine"):
        expected = divergence_coefficients([{"w": w} for w in whole], metric)["w"]
        got = divergence_coefficients(split, metric, groups=groups)
        assert set(got) == set(groups)
        np.testing.assert_allclose(got["m.weight"], expected)
        np.testing.assert_allclose(got["m.bias"], expected)
    with pytest.raises(ValueError, match=r"m\.bias"):
        divergence_coefficients(split, groups={"m.weight": "m"})


def test_simplex_projection_of_agnostic_federated_learning():
    uniform, losses = np.full(3, 1 / 3), np.array([1.0, 2.0, 3.0])
    np.testing.assert_allclose(project_simplex(uniform + 0.1 * losses), [0.233333, 0.333333, 0.433333], atol=1e-6)
    np.testing.assert_allclose(project_simplex(uniform + 0.5 * losses), [0, 0.25, 0.75], atol=1e-12)
    np.testing.assert_allclose(project_simplex(uniform + 0.5 * np.full(3, 2.0)), uniform)
    np.testing.assert_allclose(project_simplex(uniform), uniform)
    np.testing.assert_array_equal(project_simplex([5.0]), [1.0])
    for bad in ([], [np.nan, 1.0], [[1.0]]):
        with pytest.raises(ValueError, match="project_simplex"):
            project_simplex(bad)
