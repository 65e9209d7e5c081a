"""Assigns images to clients: train/validation splits, subsets, and partitions of a domain. Pure NumPy."""

import hashlib
import math
import threading

import numpy as np

from fedsim.common.errors import UserError
from fedsim.data.client_data import Split

REDRAWS = 200  # Dirichlet draws until every client has enough images, as in NIID-Bench
MIN_IMAGES = 3  # of a client: two to train (batch norm needs two), one to validate


class _ThisThread(threading.local):
    """A RandomState of each thread, because to make one takes sixty times as long as to seed it."""

    def __init__(self) -> None:
        self.rng = np.random.RandomState()


_this_thread = _ThisThread()


def seed_hash(*name: str | int) -> int:
    """DomainBed's seed of a named stream: int(md5(str(name))) mod 2^31, the tuple printed as Python prints it."""
    text = str(name).encode()
    digest = hashlib.md5(text, usedforsecurity=False).hexdigest()
    return int(digest, 16) % 2**31


def shuffled(count: int, seed: int) -> np.ndarray:
    """Permutation of 0..count-1 by a RandomState with this seed, int64 [count]."""
    order = np.arange(count, dtype=np.int64)
    _this_thread.rng.seed(seed)
    _this_thread.rng.shuffle(order)
    return order


def by_class(order: np.ndarray, labels: np.ndarray) -> list[np.ndarray]:
    """Returns the indices of an order class by class, each class in that order; labels [N] are those of 0..N-1."""
    of_order = labels[order]
    return [order[of_order == label] for label in np.unique(labels)]


def random_split(count: int, holdout: float, seed: int) -> Split:
    """DomainBed's split of 0..count-1 into (train, validation), not stratified by class.

    The first floor(holdout * count) indices of a shuffled list validate ("out"), the rest train ("in"), so that a
    smaller holdout is a prefix of a larger one. We differ only where the floor is 0: then one image validates.

    Source: DomainBed `split_dataset`, seed = seed_hash(trial_seed, env_index).
    """
    order = shuffled(count, seed)
    held = max(1, int(holdout * count))
    return order[held:], order[:held]


def stratified_split(labels: np.ndarray, holdout: float, seed: int) -> Split:
    """Split of 0..N-1 into (train, validation) with floor(holdout * n_c) validation images of every class (CSAC)."""
    order = shuffled(len(labels), seed)
    train, validation = [], []
    for members in by_class(order, labels):
        held = int(holdout * len(members))
        validation.append(members[:held])
        train.append(members[held:])
    if not sum(map(len, validation)):  # every class is tiny: one image of the largest class validates
        counts = [len(members) for members in train]
        largest = int(np.argmax(counts))
        members = train[largest]
        validation[largest] = members[:1]
        train[largest] = members[1:]
    return np.concatenate(train), np.concatenate(validation)


def fraction_subset(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Sorted indices of `fraction` of every class, rounded, at least one. A larger fraction contains a smaller."""
    if fraction >= 1:
        return np.arange(len(labels), dtype=np.int64)
    order = shuffled(len(labels), seed)
    chosen = []
    for members in by_class(order, labels):
        count = max(1, round(fraction * len(members)))
        chosen.append(members[:count])
    return np.sort(np.concatenate(chosen))


def iid_partition(count: int, clients: int, seed: int) -> list[np.ndarray]:
    """0..count-1 shuffled and dealt to `clients` parts whose sizes differ by at most one."""
    _check_pool(count, clients)
    order = shuffled(count, seed)
    return [np.sort(part) for part in deal(order, clients)]


def deal(order: np.ndarray, clients: int) -> list[np.ndarray]:
    """Shuffled indices dealt one by one to `clients` parts, whose sizes differ by at most one; parts may be empty."""
    return [order[client::clients] for client in range(clients)]


def cut_by_shares(members: np.ndarray, shares: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    """Cuts groups in order into K consecutive parts; a group is in the part in whose share its middle image lies.

    members [n] are groups, sizes [n] the numbers of their images, shares [K] the parts' shares of all these images
    """
    middles = np.cumsum(sizes) - sizes / 2
    ends = np.cumsum(shares)[:-1] * sizes.sum()
    places = np.searchsorted(middles, ends)
    return np.split(members, places)


def dirichlet_deal(
    order: np.ndarray,
    labels: np.ndarray,
    classes: int,
    clients: int,
    alpha: float,
    seed: int,
    sizes: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Shuffled indices dealt to `clients` parts by shares q_c ~ Dir(alpha * 1_K) of every class; parts may be empty.

    order [n] are indices, labels [n] their classes 0..classes-1. The same seed gives the same shares for all images.
    With sizes [n] the indices are those of groups of so many images; see `cut_by_shares`.
    """
    rng = np.random.RandomState(seed)
    shares = rng.dirichlet(np.full(clients, alpha), size=classes)
    if sizes is None:
        sizes = np.ones(len(order), np.int64)
    parts = []
    for label in range(classes):
        is_member = labels == label
        pieces = cut_by_shares(order[is_member], shares[label], sizes[is_member])
        parts.append(pieces)
    return [np.concatenate(pieces) for pieces in zip(*parts)]


def dirichlet_partition(
    labels: np.ndarray,
    clients: int,
    alpha: float,
    seed: int,
) -> list[np.ndarray]:
    """0..N-1 shared between clients; the shares of every class are drawn from Dirichlet(alpha).

    q_c ~ Dir(alpha * 1_K); client k gets the share q_ck of class c (Hsu et al. 2019; FedIG-A appendix). The draw is
    repeated until every client has 3 images (the rule of NIID-Bench, with its smaller bound). UserError when 200 draws
    are not enough. The shares of all classes are drawn first, and only shares that give enough images are filled.
    """
    _check_pool(len(labels), clients)
    rng = np.random.RandomState(seed)
    alphas = np.full(clients, alpha)
    classes, sizes = np.unique(labels, return_counts=True)
    for _ in range(REDRAWS):
        shares = rng.dirichlet(alphas, size=len(classes))
        ends = np.cumsum(shares, axis=1) * sizes[:, None]
        cuts = np.round(ends[:, :-1]).astype(np.int64)
        counts = np.diff(cuts, axis=1, prepend=0, append=sizes[:, None])  # images of each class and client
        smallest = counts.sum(axis=0).min()
        if smallest < MIN_IMAGES:
            continue
        chunks = []
        for label, places in zip(classes, cuts):
            members = np.flatnonzero(labels == label)
            chunks.append(np.split(rng.permutation(members), places))
        return [np.sort(np.concatenate(parts)) for parts in zip(*chunks)]
    raise UserError(
        f"a Dirichlet partition with data.alpha = {alpha} leaves one of {clients} clients with fewer than "
        f"{MIN_IMAGES} of {len(labels)} images; raise data.alpha or lower data.clients_per_domain"
    )


def classes_partition(
    labels: np.ndarray,
    clients: int,
    per_client: int,
    seed: int,
) -> list[np.ndarray]:
    """0..N-1 shared between clients so that each has `per_client` of the C classes (McMahan et al., AISTATS 2017).

    The classes stand in a seeded order, as in a ring, and client k has the `per_client` classes from place k *
    per_client on. A class is dealt evenly to the clients that have it, of which there are floor or ceil(clients *
    per_client / C). Raises UserError when a class would belong to nobody, when there are fewer classes, and when a
    client would have fewer than 3 images.
    """
    _check_pool(len(labels), clients)
    present = np.unique(labels)
    _check_classes(len(present), clients, per_client)
    ring = present[shuffled(len(present), seed)]
    owner = np.full(len(labels), -1)
    for place, label in enumerate(ring):
        owners = []
        for client in range(clients):
            distance = place - client * per_client
            if distance % len(ring) < per_client:
                owners.append(client)
        members = np.flatnonzero(labels == label)
        count = len(members)
        order = shuffled(count, seed_hash(seed, int(label)))
        owner[members[order]] = np.resize(owners, count)
    pools = [np.flatnonzero(owner == client) for client in range(clients)]
    smallest = min(map(len, pools))
    if smallest < MIN_IMAGES:
        raise UserError(
            f"data.classes_per_client = {per_client} leaves one of {clients} clients with fewer than {MIN_IMAGES} of "
            f"{len(labels)} images; raise it, lower data.clients_per_domain or raise data.fraction"
        )
    return pools


def _check_classes(count: int, clients: int, per_client: int) -> None:
    """UserError where clients with so many of the `count` classes each leave a class to nobody, or lack classes."""
    least = math.ceil(count / clients)
    if not least <= per_client <= count:
        raise UserError(
            f"data.classes_per_client is {per_client}: {clients} clients of a domain with {count} classes need between "
            f"{least} and {count}, so that every class belongs to a client; change it, or data.clients_per_domain"
        )


def _check_pool(count: int, clients: int) -> None:
    if count < clients * MIN_IMAGES:
        raise UserError(
            f"{count} images of a domain are too few for {clients} clients (each needs 2 for training "
            "and 1 for validation); lower data.clients_per_domain or raise data.fraction"
        )
