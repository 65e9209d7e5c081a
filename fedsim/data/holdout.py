"""Which images of a domain train and which validate: drawn, or named by published lists."""

import numpy as np

from fedsim.common.errors import UserError
from fedsim.data.client_data import Split
from fedsim.data.groups import groups_of, split_groups, subset_of_groups
from fedsim.data.reader import Reader, read_groups
from fedsim.data.splits import fraction_subset, random_split, seed_hash, stratified_split
from fedsim.settings import DataSettings


def use_fraction(
    labels: np.ndarray,
    groups: np.ndarray | None,
    fraction: float,
    seed: int,
) -> np.ndarray:
    """Sorted positions of a fraction of the images of every class; with groups int64 [N] of whole groups."""
    if groups is None:
        return fraction_subset(labels, fraction, seed)
    return subset_of_groups(groups_of(groups, labels), fraction, seed)


def hold_out(
    labels: np.ndarray,
    groups: np.ndarray | None,
    holdout: float,
    seed: int,
    where: str,
) -> Split:
    """DomainBed's (train, validation) positions of images; with groups int64 [N] of whole groups, see `split_pool`."""
    if groups is None:
        return random_split(len(labels), holdout, seed)
    return split_groups(groups_of(groups, labels), holdout, seed, False, where)


def split_pool(
    data: DataSettings,
    labels: np.ndarray,
    groups: np.ndarray | None,
    seed: int,
    where: str,
) -> Split:
    """(train, validation) positions of images with these labels, by `data.split`; with groups int64 [N] whole groups.

    Raises UserError, which begins with `where`, when all images are one group.
    """
    if data.split != "stratified":
        return hold_out(labels, groups, data.holdout, seed, where)
    if groups is None:
        return stratified_split(labels, data.holdout, seed)
    return split_groups(groups_of(groups, labels), data.holdout, seed, True, where)


def whole_split(read: Reader, domain: str, labels: np.ndarray) -> Split:
    """(train, validation) of a domain whose images have these labels, before they are shared between clients."""
    data, groups = read.data, read_groups(read, domain, len(labels))
    stream = data.seed_of_splits, read.found.environment(domain)
    if data.split == "lists":
        return _listed_split(read, domain, labels, groups, seed_hash(*stream))
    pool = use_fraction(labels, groups, data.fraction, seed_hash(*stream, "fraction"))
    train, validation = split_pool(data, labels[pool], chosen_groups(groups, pool), seed_hash(*stream), domain)
    return pool[train], pool[validation]


def chosen_groups(groups: np.ndarray | None, indices: np.ndarray) -> np.ndarray | None:
    """The groups of some images, int64 [n]; None where each image is by itself."""
    return None if groups is None else groups[indices]


def _listed_split(
    read: Reader,
    domain: str,
    labels: np.ndarray,
    groups: np.ndarray | None,
    seed: int,
) -> Split:
    """(train, validation) of the published lists; without a validation list, `holdout` of the training list."""
    data = read.data
    if data.clients_per_domain > 1 or data.fraction < 1:
        raise UserError(
            "data.split = 'lists' gives all images of a domain to one client; leave "
            "data.clients_per_domain and data.fraction at 1"
        )
    train, validation = read.required(domain, "train"), read.listed(domain, "validation")
    if validation is None:
        trained, held = split_pool(data, labels[train], chosen_groups(groups, train), seed, domain)
        return train[trained], train[held]
    both = np.intersect1d(train, validation)
    if len(both):
        raise UserError(f"{domain}: {len(both)} images are in the training list and in the validation list")
    if groups is not None and (torn := np.intersect1d(groups[train], groups[validation])).size:
        raise UserError(
            f"{domain}: {len(torn)} groups have images in the training list and in the validation list; "
            "correct the lists, or leave out data.group and data.columns.group"
        )
    return train, validation


def take_test(
    read: Reader,
    domain: str,
    labels: np.ndarray,
    split: Split,
    seed: int,
    where: str,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(train, validation, test) of a client, given its (train, validation): what `data.source_test` takes from train.

    The test is empty without it. Groups stay whole. Raises UserError where a test list names images, or images of a
    group, that train or validate.
    """
    data, (train, validation) = read.data, split
    groups = read_groups(read, domain, len(labels))
    if data.source_test == "list":
        test = read.required(domain, "test")
        used = np.concatenate([train, validation])
        both = np.intersect1d(test, used) if groups is None else np.intersect1d(groups[test], groups[used])
        if len(both):
            raise UserError(
                f"{domain}: {len(both)} images or groups of the test list train or validate, so that data.source_test "
                "would measure what was learned; correct the lists, or leave it at 0"
            )
        return train, validation, test
    if not data.source_test:
        return train, validation, np.zeros(0, np.int64)
    trained, tested = hold_out(labels[train], chosen_groups(groups, train), data.source_test, seed, where)
    return train[trained], validation, train[tested]


def refuse_few(
    client: str,
    train: int,
    validation: int,
    change: str,
) -> None:
    """UserError when a client has too few images; `change` says what to change."""
    if train < 2 or not validation:
        raise UserError(
            f"client {client!r} has {train} training and {validation} validation images, at least 2 and 1 "
            f"are needed; change {change}"
        )
