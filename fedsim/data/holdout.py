"""Which images of a domain train and which validate: drawn, or named by published lists."""

import numpy as np

from fedsim.common.errors import UserError
from fedsim.data.client_data import FullSplit, Split, entries_at
from fedsim.data.groups import groups_of, split_groups, subset_of_groups
from fedsim.data.reader import Reader, read_groups
from fedsim.data.splits import fraction_subset, random_split, seed_hash, stratified_split
from fedsim.settings import DataSettings


def stream_of(read: Reader, domain: str) -> tuple[int, int]:
    """Returns what begins the name of each random stream of a domain: the seed of splits, and the domain's number."""
    return read.data.seed_of_splits, read.found.environment(domain)


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
    pool: np.ndarray,
    seed: int,
    where: str,
) -> Split:
    """Splits the images `pool` int64 [n] of a domain into (train, validation), by `data.split`.

    labels, groups: int64 [N] of all images of the domain; images of one group stay together

    Raises UserError, which begins with `where`, when all images are one group.
    """
    labels = labels[pool]
    groups = entries_at(groups, pool)
    if data.split != "stratified":
        train, validation = hold_out(labels, groups, data.holdout, seed, where)
    elif groups is None:
        train, validation = stratified_split(labels, data.holdout, seed)
    else:
        train, validation = split_groups(groups_of(groups, labels), data.holdout, seed, True, where)
    return pool[train], pool[validation]


def whole_split(read: Reader, domain: str, labels: np.ndarray) -> Split:
    """(train, validation) of a domain whose images have these labels, before they are shared between clients."""
    data = read.data
    groups = read_groups(read, domain, len(labels))
    stream = stream_of(read, domain)
    seed = seed_hash(*stream)
    if data.split == "lists":
        return _listed_split(read, domain, labels, groups, seed)
    pool = use_fraction(labels, groups, data.fraction, seed_hash(*stream, "fraction"))
    return split_pool(data, labels, groups, pool, seed, domain)


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
    train = read.required(domain, "train")
    validation = read.listed(domain, "validation")
    if validation is None:
        return split_pool(data, labels, groups, train, seed, domain)
    both = np.intersect1d(train, validation)
    if len(both):
        raise UserError(f"{domain}: {len(both)} images are in the training list and in the validation list")
    if groups is None:
        return train, validation
    torn = np.intersect1d(groups[train], groups[validation])
    if len(torn):
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
) -> FullSplit:
    """(train, validation, test) of a client, given its (train, validation): what `data.source_test` takes from train.

    The test is empty without it. Groups stay whole. Raises UserError where a test list names images, or images of a
    group, that train or validate.
    """
    share = read.data.source_test
    train, validation = split
    groups = read_groups(read, domain, len(labels))
    if share == "list":
        test = read.required(domain, "test")
        _refuse_learned(domain, groups, test, np.concatenate(split))
        return train, validation, test
    if not share:
        return train, validation, np.zeros(0, np.int64)
    trained, tested = hold_out(
        labels[train],
        entries_at(groups, train),
        share,
        seed,
        where,
    )
    return train[trained], validation, train[tested]


def _refuse_learned(
    domain: str,
    groups: np.ndarray | None,
    test: np.ndarray,
    learned: np.ndarray,
) -> None:
    """UserError where images of the test list, or images of their groups, are among those that train or validate."""
    if groups is not None:
        test, learned = groups[test], groups[learned]
    both = np.intersect1d(test, learned)
    if len(both):
        raise UserError(
            f"{domain}: {len(both)} images or groups of the test list train or validate, so that data.source_test "
            "would measure what was learned; correct the lists, or leave it at 0"
        )


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
