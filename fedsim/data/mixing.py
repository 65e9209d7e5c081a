"""Clients with more than one domain: `data.mix` shares a part of every source domain between all clients.

With n_d images of domain d, C clients in total, and M_d clients with the own domain d, client c holds

    n_dc = mix * n_d / C  +  (1 - mix) * [d is c's domain] * n_d / M_d

images of domain d. mix = 0 is one domain per client, and mix = 1 the same mixture for all.

Source: Bai et al., Benchmarking Algorithms for Federated Domain Generalization, ICLR 2024 (lambda; heterogeneous
partition). Theirs gives larger domains more clients; ours gives `data.clients_per_domain` to each. The images for
validation are drawn per domain before the images are shared, so that they are the same for every mix; both parts are
then shared in the same way. Both shares of a domain are dealt as `data.partition` says; with Dirichlet a client prefers
the same classes in all domains.
"""

from collections.abc import Sequence

import numpy as np

from fedsim.common.errors import UserError
from fedsim.data.client_data import ClientData, clients_of, joined, unless_square
from fedsim.data.holdout import listed_split, split_pool
from fedsim.data.reader import reader
from fedsim.data.row import Benchmark
from fedsim.data.splits import deal, dirichlet_deal, fraction_subset, seed_hash, shuffled
from fedsim.settings import DataSettings


def load_mixed(data: DataSettings, found: Benchmark, client: str, place: int, domains: Sequence[str]) -> ClientData:
    """Data of client number `place` (in the order of clients) of the source `domains`, one after the other.

    Raises UserError when it has fewer than two training images and one validation image.
    """
    read, parts = reader(data, found), []
    for number, domain in enumerate(domains):
        images, labels = read.images(domain)
        train, validation = _shares(data, found, domain, number, len(domains), labels)[place]
        own = np.concatenate([train, validation])
        train, validation = np.split(np.arange(len(own), dtype=np.int64), [len(train)])
        zeros = np.zeros(len(own), np.int64)
        sizes, masks = (None if each is None else each[own] for each in (read.sizes(domain), read.masks(domain)))
        part = images[own], labels[own], train, validation, found.classes, (domain,), zeros, unless_square(sizes), masks
        parts.append(ClientData(client, *part))
    _check(client, sum(len(part.train) for part in parts), sum(len(part.validation) for part in parts))
    return joined(client, parts, parts)


def check_mix(data: DataSettings, found: Benchmark, domains: Sequence[str]) -> None:
    """UserError when the mixture leaves a client with too few images; opens none."""
    read = reader(data, found)
    shares = [
        _shares(data, found, domain, number, len(domains), read.labels(domain)) for number, domain in enumerate(domains)
    ]
    clients = [client for domain in domains for client in clients_of(domain, data.clients_per_domain)]
    for client, own in zip(clients, zip(*shares), strict=True):
        _check(client, *(sum(map(len, part)) for part in zip(*own)))


def _check(client: str, train: int, validation: int) -> None:
    if train < 2 or not validation:
        raise UserError(
            f"client {client!r} has {train} training and {validation} validation images, at least 2 and 1 are needed; "
            "change data.holdout, data.fraction, data.mix or data.clients_per_domain"
        )


def _shares(
    data: DataSettings, found: Benchmark, domain: str, number: int, domains: int, labels: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(train, validation) indices of every client in the source domain with that number."""
    environment, split_seed = found.environment(domain), data.seed_of_splits
    if data.split == "lists":
        parts = listed_split(data, found, domain, seed_hash(split_seed, environment))
    else:
        pool = fraction_subset(labels, data.fraction, seed_hash(split_seed, environment, "fraction"))
        parts = tuple(pool[part] for part in split_pool(data, labels[pool], seed_hash(split_seed, environment)))
    own, classes = data.clients_per_domain, len(found.classes)
    dealt = []
    for name, indices in zip(("train", "validation"), parts):
        order = indices[shuffled(len(indices), seed_hash(split_seed, environment, "mix", name))]
        common = round(data.mix * len(order))
        shares = _dealt(data, labels, order[:common], classes, own * domains, seed_hash(split_seed, "mix"))
        rest = _dealt(data, labels, order[common:], classes, own, seed_hash(split_seed, environment, "own"))
        for index in range(own):
            shares[number * own + index] = np.concatenate([shares[number * own + index], rest[index]])
        dealt.append([np.sort(share) for share in shares])
    return list(zip(*dealt))


def _dealt(
    data: DataSettings, labels: np.ndarray, order: np.ndarray, classes: int, clients: int, seed: int
) -> list[np.ndarray]:
    """Shuffled indices dealt to clients as `data.partition` says."""
    if data.partition == "iid":
        return deal(order, clients)
    return dirichlet_deal(order, labels[order], classes, clients, data.alpha, seed)
