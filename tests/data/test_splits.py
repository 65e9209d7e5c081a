"""Splits and partitions: DomainBed's published check values, properties for all inputs, and published split lists."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.common.errors import UserError
from fedsim.data import load_client, load_target
from fedsim.data.fingerprint import fingerprints
from fedsim.data.splits import (
    classes_partition,
    dirichlet_partition,
    fraction_subset,
    iid_partition,
    random_split,
    seed_hash,
    shuffled,
    stratified_split,
)
from fedsim.runs.plan import resolve
from fedsim.settings import DataSettings
from fedsim.settings.experiment import read_experiment

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


def test_shares_follow_dirichlets_moments():
    """E q = 1/K and Var q = (1/K)(1 - 1/K) / (K alpha + 1), for K = 4 and alpha = 0.5: 0.25 and 0.0625."""
    labels = np.repeat(np.arange(10), 500)
    parts = [dirichlet_partition(labels, 4, 0.5, seed) for seed in range(60)]
    shares = np.array([np.bincount(labels[part], minlength=10) / 500 for drawn in parts for part in drawn])
    assert shares.mean() == pytest.approx(0.25)
    assert shares.var() == pytest.approx(0.0625, rel=0.1)


@pytest.fixture
def lists(tree_settings, tmp_path):
    """Settings with lists, and a function that writes one: lists("photo_train", ["photo/cat/000.png 1"])."""
    folder = tmp_path / "lists"
    folder.mkdir()

    def write(name: str, lines: list[str]) -> None:
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")

    return tree_settings(split="lists", test_split="list", lists="../lists"), write


def test_the_lists_say_who_trains_and_validates(lists):
    data, write = lists
    write("photo_train_kfold", ["photo/dog/002.png 2", "photo/cat/000.png 1", "photo/cat/003.png 1", ""])
    write("photo_crossval_kfold", ["PACS/photo/dog/000.png", "cat\\001.png"])
    own = load_client(data, "photo")
    assert own.train.tolist() == [0, 3, 6]  # cat 0 to 3, dog 4 to 7, in sorted order
    assert own.validation.tolist() == [1, 4]
    write("sketch_test", ["sketch/dog/001.png 2"])
    assert load_target(data, "sketch")[2].tolist() == [5]


def test_without_a_validation_list_a_part_of_the_training_list_validates(lists):
    data, write = lists
    write("photo_train", [f"photo/{name}/00{index}.png" for name in ("cat", "dog") for index in range(3)])
    own, before = load_client(data.model_copy(update={"holdout": 0.34}), "photo"), fingerprints(data)["photo"]
    assert (len(own.train), len(own.validation)) == (4, 2)
    assert sorted([*own.train, *own.validation]) == [0, 1, 2, 4, 5, 6]
    write("photo_train", ["photo/cat/001.png"])
    assert fingerprints(data)["photo"]["content"] != before["content"]


@pytest.mark.parametrize(("lines", "said"), [
    (["photo/cat/999.png 1"], r"photo_train.txt, line 1: 'photo/cat/999.png' is none of the images of photo"),
    (["photo/cat/000.png", "a/photo/cat/000.png"], r"line 2: 'a/photo/cat/000.png' was named in line 1 already"),
    (["sketch/cat/000.png 1"], r"line 1: 'sketch/cat/000.png' is an image of another domain than photo"),
    (["photo/cat/000.png"], "1 training and 1 validation images"),
    (["photo/cat/001.png", "photo/dog/000.png", "photo/dog/001.png"], "1 images are in the training list and in"),
    (None, r"photo_train.txt is not text in UTF-8; save it in this encoding"),
])  # fmt: skip
def test_lists_that_cannot_be_meant_are_refused(lists, tmp_path, lines, said):
    data, write = lists
    write("photo_train", lines or [])
    write("photo_val", ["photo/cat/001.png"])
    if lines is None:
        (tmp_path / "lists" / "photo_train.txt").write_bytes("photo/cat/000.png caf\xe9".encode("latin-1"))
    with pytest.raises(UserError, match=rf"\A.*{said}.*\Z"):
        load_client(data, "photo")


@pytest.mark.parametrize(("changes", "client", "said"), [
    ({}, "photo", r"no list photo_train\*.txt"),
    ({"lists": "elsewhere"}, "photo", r"no folder .*elsewhere; set data.lists"),
    ({"lists": ""}, "photo", r"data.lists is empty; set data.lists"),
    ({"dataset": "digits"}, "rot0", r"has no files that a list could name"),
    ({"fraction": 0.5}, "photo", r"all images of a domain to one client"),
])  # fmt: skip
def test_missing_lists_are_named(lists, changes, client, said):
    with pytest.raises(UserError, match=said):
        load_client(lists[0].model_copy(update=changes), client)


@given(clients=st.integers(2, 6), per_client=st.integers(1, 4), seed=st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_parts_of_classes_have_so_many_classes_and_every_image(clients, per_client, seed):
    labels = np.arange(120) % 4
    if clients * per_client < 4:
        with pytest.raises(UserError, match=r"data.classes_per_client is .* every class belongs to a client"):
            classes_partition(labels, clients, per_client, seed)
        return
    parts = classes_partition(labels, clients, per_client, seed)
    assert [len(np.unique(labels[part])) for part in parts] == [per_client] * clients
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(120))
    owners = [sum(label in labels[part] for part in parts) for label in range(4)]
    assert max(owners) - min(owners) <= 1


def test_parts_of_classes_by_hand():
    """Three clients, three classes, two each: every class has two owners, who share its 10 images as 5 and 5."""
    labels = np.repeat([0, 1, 2], 10)
    parts = classes_partition(labels, 3, 2, seed=0)
    assert [np.sort(np.bincount(labels[part], minlength=3)).tolist() for part in parts] == [[0, 5, 5]] * 3


def test_clients_of_a_run_have_so_many_classes():
    data = DataSettings(clients_per_domain=5, partition="classes", classes_per_client=2)
    for number in range(5):
        assert np.count_nonzero(load_client(data, f"rot0/{number}").class_counts()) == 2
    experiment = read_experiment("digits", ["data.clients_per_domain=5", "data.partition=classes", "data.mix=0.5"])
    with pytest.raises(UserError, match=r"data.partition = 'classes' deals single images of a domain's own clients"):
        resolve(experiment)
    with pytest.raises(UserError, match=r"data.classes_per_client is 1: 5 clients .* 10 classes need between 2 and 10"):
        load_client(data.model_copy(update={"classes_per_client": 1}), "rot0/0")
