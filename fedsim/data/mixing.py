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

from fedsim.data.client_data import ClientData, Split, clients_of, joined, unless_square
from fedsim.data.groups import Groups, groups_of
from fedsim.data.holdout import chosen_groups, refuse_few, whole_split
from fedsim.data.reader import Reader, read_groups, read_images
from fedsim.data.splits import deal, dirichlet_deal, seed_hash, shuffled
from fedsim.settings import DataSettings

CHANGE = "data.holdout, data.fraction, data.mix or data.clients_per_domain"


def load_mixed(read: Reader, client: str, place: int, domains: Sequence[str]) -> ClientData:
    """Data of client number `place` (in the order of clients) of the source `domains`, one after the other.

    Raises UserError when it has fewer than two training images and one validation image.
    """
    parts, classes = [], read.found.classes
    for domain in domains:
        images, labels = read_images(read, domain)
        train, validation = _shares(read, domains, domain, labels)[place]
        positions = np.concatenate([train, validation])
        train, validation = np.split(np.arange(len(positions), dtype=np.int64), [len(train)])
        zeros = np.zeros(len(positions), np.int64)
        sizes, masks = (None if each is None else each[positions] for each in (read.sizes(domain), read.masks(domain)))
        part = (
            images[positions],
            labels[positions],
            train,
            validation,
            classes,
            (domain,),
            zeros,
            unless_square(sizes),
            masks,
        )
        parts.append(ClientData(client, *part))
    mixture = joined(client, parts, parts)
    refuse_few(client, len(mixture.train), len(mixture.validation), CHANGE)
    return mixture


def check_mix(read: Reader, domains: Sequence[str]) -> None:
    """UserError when the mixture leaves a client with too few images; opens none."""
    shares = [_shares(read, domains, domain, read.labels(domain)) for domain in domains]
    clients = [client for domain in domains for client in clients_of(domain, read.data.clients_per_domain)]
    for client, share in zip(clients, zip(*shares), strict=True):
        train, validation = (sum(map(len, part)) for part in zip(*share))
        refuse_few(client, train, validation, CHANGE)


def _shares(read: Reader, domains: Sequence[str], domain: str, labels: np.ndarray) -> list[Split]:
    """Indices of every client in one of the source `domains`."""
    data, environment, split_seed = read.data, read.found.environment(domain), read.data.seed_of_splits
    per_domain, classes = data.clients_per_domain, len(read.found.classes)
    numbers = read_groups(read, domain, len(labels))
    dealt = []
    for name, indices in zip(("train", "validation"), whole_split(read, domain, labels)):
        groups = groups_of(chosen_groups(numbers, indices), labels[indices])
        order = shuffled(len(groups.sizes), seed_hash(split_seed, environment, "mix", name))
        common = len(groups.first(order, round(data.mix * len(indices))))
        shares = _dealt(data, groups, order[:common], classes, per_domain * len(domains), seed_hash(split_seed, "mix"))
        rest = _dealt(data, groups, order[common:], classes, per_domain, seed_hash(split_seed, environment, "own"))
        for index, more in enumerate(rest, start=per_domain * domains.index(domain)):
            shares[index] = np.concatenate([shares[index], more])
        dealt.append([np.sort(indices[groups.images(share)]) for share in shares])
    return list(zip(*dealt))


def _dealt(
    data: DataSettings, groups: Groups, order: np.ndarray, classes: int, clients: int, seed: int
) -> list[np.ndarray]:
    """Shuffled groups dealt to clients as `data.partition` says."""
    if data.partition == "iid":
        return deal(order, clients)
    return dirichlet_deal(order, groups.labels[order], classes, clients, data.alpha, seed, groups.sizes[order])
