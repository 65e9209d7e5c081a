"""Means of clients' models. Replies on disk give the same numbers as replies in memory, bit for bit."""

import os
import tracemalloc
from contextlib import closing

import numpy as np
import pytest

from fedsim.common.errors import UserError
from strategies import aggregate
from strategies.aggregate import divergence_coefficients, project_simplex, tensorwise_mean, weighted_mean
from strategies.banks.checks import layout_of, misfit
from strategies.fuse.coordinate_median import CoordinateMedian
from strategies.fuse.krum import Krum
from strategies.parts import ServerRound, Update
from strategies.stored import Storage, StoredArrays, heads_of


def vectors(*values):
    return [{"w": np.atleast_1d(np.array(value, dtype=np.float64))} for value in values]


@pytest.mark.parametrize("clients", [3, 20])
def test_weighted_mean_equals_the_plain_formula(clients):
    sent, weights = states(clients), np.random.default_rng(9).random(clients)
    mean = weighted_mean(sent, weights)
    assert list(mean) == list(sent[0])
    for name, array in sent[0].items():
        assert (mean[name].shape, mean[name].dtype) == (array.shape, array.dtype)
        if array.dtype.kind == "f":
            expected = sum(p * state[name].astype(np.float64) for p, state in zip(weights / weights.sum(), sent))
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
    sent, weights = states(20), np.random.default_rng(1).random(20)
    first = weighted_mean(sent, weights)
    again = weighted_mean([dict(reversed(state.items())) for state in sent], weights)
    monkeypatch.setattr(aggregate, "THREADS", 1)
    single = weighted_mean(sent, weights)
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


CLIENTS = 37  # two complete groups of the average, and an incomplete one


def states(clients=CLIENTS):
    rng = np.random.default_rng(0)
    return [
        {
            "wide": rng.standard_normal((150, 100)).astype(np.float32),
            "half": rng.standard_normal(5).astype(np.float16),
            "one": np.float32(rng.standard_normal()).reshape(()),
            "counter": np.array(int(rng.integers(100))),
            "turned": rng.standard_normal((20, 30)).astype(np.float32).T,
            "none": np.empty((0, 3), np.float32),
            "exact": rng.standard_normal(40),
            "mask": rng.random(3) > 0.5,
            "long": rng.standard_normal((2, 50_001)).astype(np.float32),
        }
        for _ in range(clients)
    ]


@pytest.fixture
def pair(tmp_path):
    memory = states()
    with closing(Storage(tmp_path, memory=0)) as storage:
        yield memory, [storage.put(state) for state in memory]


def same(a, b):
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert a[name].shape == b[name].shape
        assert np.ascontiguousarray(a[name]).tobytes() == np.ascontiguousarray(b[name]).tobytes(), name


def test_tensors_come_back_as_they_went(pair):
    memory, stored = pair
    assert all(isinstance(state, StoredArrays) for state in stored)
    for one, other in zip(memory, stored, strict=True):
        same(one, other)
        assert heads_of(one) == heads_of(other)
        assert layout_of(one) == layout_of(other)
        assert misfit(other, one) == ""
    assert "misfit" not in stored[0]


@pytest.mark.parametrize("block", [32768, 700])
def test_means_are_those_of_memory_to_the_last_bit(pair, monkeypatch, block):
    monkeypatch.setattr(aggregate, "BLOCK", block)
    memory, stored = pair
    weights = np.random.default_rng(1).dirichlet(np.ones(CLIENTS))
    expected = weighted_mean(memory, weights)
    same(expected, weighted_mean(stored, weights))
    same(expected, weighted_mean([*memory[:7], *stored[7:]], weights))  # some fitted into memory
    divergence = divergence_coefficients(memory)
    assert all((divergence[name] == other).all() for name, other in divergence_coefficients(stored).items())
    same(tensorwise_mean(memory, divergence), tensorwise_mean(stored, divergence))


@pytest.mark.parametrize("fuse", [None, CoordinateMedian(), Krum(2, 5)])
def test_what_a_rule_holds_in_memory(tmp_path, fuse):
    """Parts that compare clients: one tensor of each (Krum and Bulyan took 240 times one model, with all of forty in
    memory). The average: the result and the blocks, two threads with 16 rows of a block in float64 each."""
    rng, width = np.random.default_rng(0), 6_000 if fuse else 60_000
    start = {f"w{index}": rng.standard_normal(width).astype(np.float32) for index in range(10)}
    with closing(Storage(tmp_path, memory=0)) as storage:
        stored = [storage.put({name: array + np.float32(k) for name, array in start.items()}) for k in range(20)]
        updates = [Update(f"c{k}", 1, own) for k, own in enumerate(stored)]
        server = ServerRound(1, 2, [update.client for update in updates], start, parameters=frozenset(start))
        tracemalloc.start()
        fuse.fuse(updates, dict.fromkeys(server.clients, 1 / 20), server) if fuse else weighted_mean(stored, [1.0] * 20)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    size = sum(array.nbytes for array in start.values())
    assert peak < (30 * size if fuse else size + 2 * (aggregate.GROUP + 3) * aggregate.BLOCK * 8)


STATE = {"w": np.ones(1000, np.float32)}


def test_the_file_is_used_after_memory_and_written_over(tmp_path, monkeypatch):
    """Five replies that fit together are not written; of thirty only what always has room is kept. The file's
    space is used again, up to a size; tensors of an earlier round are an error, not other numbers."""
    monkeypatch.setattr("strategies.stored.WHOLE_BYTES", 20_000)
    with closing(Storage(tmp_path, memory=9000)) as storage:
        kept = [storage.put(STATE) for _ in range(4)]
        assert [isinstance(one, StoredArrays) for one in kept] == [False, False, True, True]
        assert list(tmp_path.iterdir()) == []  # the file has no name
        storage.clear()
        assert storage.put(STATE) is STATE
        assert storage.put({}) == {}
        for clients, held in ((5, 5), (30, 2), (5, 5), (1, 1)):
            storage.clear()
            storage.expect(clients * 4000)
            assert sum(storage.put(STATE) is STATE for _ in range(clients)) == held
    monkeypatch.setattr("strategies.stored.KEPT_BYTES", 6000)
    with closing(Storage(tmp_path, memory=0)) as storage:
        old = [storage.put({"w": np.full(1000, index, np.float32)}) for index in range(3)]
        assert [float(one["w"].sum()) for one in old] == [0, 1000, 2000]
        storage.clear()
        new = storage.put({"w": np.full(1000, 7, np.float32)})
        assert os.fstat(storage.file.fileno()).st_size == 6000
        assert float(new["w"].sum()) == 7000
    for one in (old[0], new):
        with pytest.raises(RuntimeError, match="earlier round"):
            one["w"]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    storage = Storage(tmp_path / "gone", memory=0)
    said = r"cannot be written to a temporary file \(.*\); it already holds 0\.0 GB\. Free some space, or choose"
    with pytest.raises(UserError, match=said):
        storage.put({"w": np.ones(3)})
