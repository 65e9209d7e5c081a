"""Splits and partitions: DomainBed's published check values, then properties that hold for all inputs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.common.errors import UserError
from fedsim.data.splits import (
    dirichlet_partition,
    fraction_subset,
    iid_partition,
    random_split,
    seed_hash,
    shuffled,
    stratified_split,
)

quick = settings(max_examples=30)
labellings = st.lists(st.integers(0, 4), min_size=12, max_size=200).map(np.array)


def test_seeds_shuffle_and_validation_are_domainbeds():
    """The first validation indices are those of art painting."""
    names = ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (2, 0))
    expected = [894182419, 1514274641, 1325548499, 1796103049, 785910682, 472130416]
    assert [seed_hash(*name) for name in names] == expected
    assert shuffled(10, 894182419).tolist() == [2, 3, 8, 1, 4, 5, 0, 9, 6, 7]
    train, validation = random_split(2048, 0.1, seed_hash(0, 0))
    assert (validation[:5].tolist(), len(validation)) == ([548, 677, 1997, 977, 1553], 204)  # not 205
    assert train.dtype == validation.dtype == np.int64


@quick
@given(st.integers(2, 300), st.floats(0.01, 0.9), st.integers(0, 2**31 - 1))
def test_random_split_is_a_partition_and_a_prefix(count, holdout, seed):
    train, validation = random_split(count, holdout, seed)
    assert sorted([*train, *validation]) == list(range(count))
    smaller = random_split(count, holdout / 2, seed)[1]
    assert smaller.tolist() == validation[: len(smaller)].tolist()


@quick
@given(labellings, st.floats(0.05, 0.5), st.integers(0, 99))
def test_stratified_split_takes_the_floor_of_every_class(labels, holdout, seed):
    train, validation = stratified_split(labels, holdout, seed)
    assert sorted([*train, *validation]) == list(range(len(labels)))
    expected = [int(holdout * (labels == label).sum()) for label in range(5)]
    if sum(expected):
        assert np.bincount(labels[validation], minlength=5).tolist() == expected
    else:
        assert len(validation) == 1


@quick
@given(labellings, st.floats(0.01, 1), st.integers(0, 99))
def test_fraction_keeps_every_class_and_is_nested(labels, fraction, seed):
    chosen = fraction_subset(labels, fraction, seed)
    assert set(labels[chosen]) == set(labels)
    assert (np.diff(chosen) > 0).all()
    assert set(fraction_subset(labels, fraction / 2, seed)) <= set(chosen)
    assert chosen.tolist() == fraction_subset(labels, fraction, seed).tolist()


@quick
@given(st.integers(30, 200), st.integers(1, 10), st.integers(0, 99))
def test_iid_parts_are_disjoint_and_even(count, clients, seed):
    parts = iid_partition(count, clients, seed)
    assert sorted(np.concatenate(parts)) == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@quick
@given(st.integers(1, 5), st.sampled_from([0.1, 0.5, 1.0, 100.0]), st.integers(0, 99))
def test_dirichlet_parts_are_disjoint_and_large_enough(clients, alpha, seed):
    labels = np.repeat(np.arange(5), 40)
    parts = dirichlet_partition(labels, clients, alpha, seed)
    assert sorted(np.concatenate(parts)) == list(range(200))
    assert min(map(len, parts)) >= 3
    again = dirichlet_partition(labels, clients, alpha, seed)
    assert all((a == b).all() for a, b in zip(parts, again))


def test_too_few_images_for_the_clients():
    with pytest.raises(UserError, match=r"29 images .* 10 clients .* lower data.clients_per_domain"):
        iid_partition(29, 10, 0)
    with pytest.raises(UserError, match=r"raise data.alpha"):
        dirichlet_partition(np.zeros(30, dtype=int), 10, 0.01, 0)


def test_shares_follow_dirichlets_moments():
    """E q = 1/K and Var q = (1/K)(1 - 1/K) / (K alpha + 1), for K = 4 and alpha = 0.5: 0.25 and 0.0625."""
    labels = np.repeat(np.arange(10), 500)
    parts = [dirichlet_partition(labels, 4, 0.5, seed) for seed in range(60)]
    shares = np.array([np.bincount(labels[part], minlength=10) / 500 for drawn in parts for part in drawn])
    assert shares.mean() == pytest.approx(0.25)
    assert shares.var() == pytest.approx(0.0625, rel=0.1)
