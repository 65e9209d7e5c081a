"""Which images of a domain train and which validate: drawn, or named by published lists."""

import numpy as np

from fedsim.common.errors import UserError
from fedsim.data.client_data import Split
from fedsim.data.reader import Reader
from fedsim.data.splits import fraction_subset, random_split, seed_hash, stratified_split
from fedsim.settings import DataSettings


def split_pool(data: DataSettings, labels: np.ndarray, seed: int) -> Split:
    """(train, validation) positions of images with these labels, by `data.split`."""
    if data.split == "stratified":
        return stratified_split(labels, data.holdout, seed)
    return random_split(len(labels), data.holdout, seed)


def whole_split(read: Reader, domain: str, labels: np.ndarray) -> Split:
    """(train, validation) of a domain whose images have these labels, before they are shared between clients."""
    data = read.data
    stream = data.seed_of_splits, read.found.environment(domain)
    if data.split == "lists":
        return _listed_split(read, domain, seed_hash(*stream))
    pool = fraction_subset(labels, data.fraction, seed_hash(*stream, "fraction"))
    train, validation = split_pool(data, labels[pool], seed_hash(*stream))
    return pool[train], pool[validation]


def _listed_split(read: Reader, domain: str, seed: int) -> Split:
    """(train, validation) of the published lists; without a validation list, `holdout` of the training list."""
    data = read.data
    if data.clients_per_domain > 1 or data.fraction < 1:
        raise UserError(
            "data.split = 'lists' gives all images of a domain to one client; leave "
            "data.clients_per_domain and data.fraction at 1"
        )
    train, validation = read.required(domain, "train"), read.listed(domain, "validation")
    if validation is None:
        trained, held = random_split(len(train), data.holdout, seed)
        return train[trained], train[held]
    both = np.intersect1d(train, validation)
    if len(both):
        raise UserError(f"{domain}: {len(both)} images are in the training list and in the validation list")
    return train, validation


def refuse_few(client: str, train: int, validation: int, change: str) -> None:
    """UserError when a client has too few images; `change` says what to change."""
    if train < 2 or not validation:
        raise UserError(f"client {client!r} has {train} training and {validation} validation images, at least 2 and 1 "
                        f"are needed; change {change}")  # fmt: skip
