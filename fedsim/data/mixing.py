"""Clients with more than one domain: `data.mix` shares a part of every source domain between all clients.

With n_d images of domain d, C clients in total, and M_d clients with the own domain d, client c holds

    n_dc = mix * n_d / C  +  (1 - mix) * [d is c's domain] * n_d / M_d

images of domain d. mix = 0 is one domain per client, and mix = 1 the same mixture for all.

M_d is `data.clients_per_domain`, where `data.clients` does not say how many clients there are. `data.clients` may be a
table of M_d by domain, in which 1 may be left out. Or it is the number C of all clients. With at least as
many clients as domains, every domain gets one client. Each further client then goes to the domain with the most
training images per client. With fewer clients than domains, the domains come from large to small, each to the client
that has the fewest images so far. M_d is then 1, and a client has several own domains.

Source: Bai et al., Benchmarking Algorithms for Federated Domain Generalization, ICLR 2024 (lambda; heterogeneous
partition; `data.clients` is its number of clients, by its greedy rule). The images for validation are drawn per domain
before the images are shared, so that they are the same for every mix; both parts are then shared in the same way. Both
shares of a domain are dealt as `data.partition` says; with Dirichlet a client prefers the same classes in all domains.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from fedsim.data.client_data import ClientData, Split, clients_of, joined, unless_square
from fedsim.data.groups import Groups, groups_of
from fedsim.data.holdout import chosen_groups, refuse_few, whole_split
from fedsim.data.reader import Reader, read_groups, read_images
from fedsim.data.splits import deal, dirichlet_deal, seed_hash, shuffled
from fedsim.settings import DataSettings

CHANGE = "data.holdout, data.fraction, data.mix or the number of clients (data.clients, data.clients_per_domain)"


def owners(read: Reader, domains: Sequence[str]) -> dict[str, list[int]]:
    """{domain: numbers of the clients whose own domain it is} for the source `domains`; clients count from 0."""
    clients = read.data.clients
    if not clients:
        return in_blocks(domains, [read.data.clients_per_domain] * len(domains))
    if isinstance(clients, dict):
        return in_blocks(domains, [clients.get(domain, 1) for domain in domains])
    sizes = [len(whole_split(read, domain, read.labels(domain))[0]) for domain in domains]
    if clients >= len(domains):
        return in_blocks(domains, clients_by_size(sizes, clients))
    return domains_by_size(dict(zip(domains, sizes)), clients)


def in_blocks(domains: Sequence[str], counts: Sequence[int]) -> dict[str, list[int]]:
    """{domain: numbers of its clients}, with so many clients for each domain, one domain after the other."""
    ends = np.cumsum(counts)
    return {domain: list(range(end - count, end)) for domain, count, end in zip(domains, counts, ends.tolist())}


def clients_by_size(sizes: Sequence[int], clients: int) -> list[int]:
    """The number of clients of each domain: one, and each further one where a client has the most images.

    >>> clients_by_size([100, 300], 4)
    [1, 3]
    """
    counts = [1] * len(sizes)
    for _ in range(clients - len(sizes)):
        loads = [size / count for size, count in zip(sizes, counts)]
        counts[loads.index(max(loads))] += 1
    return counts


def domains_by_size(sizes: Mapping[str, int], clients: int) -> dict[str, list[int]]:
    """{domain: [its client]}: from large to small, each whole to the client that has the fewest images so far.

    Clients are then numbered in the order of their first domains.

    >>> domains_by_size({"a": 2, "b": 5, "c": 4}, 2)
    {'a': [0], 'b': [1], 'c': [0]}
    """
    loads, homes = [0] * clients, {}
    for domain in sorted(sizes, key=lambda name: -sizes[name]):
        home = loads.index(min(loads))
        loads[home] += sizes[domain]
        homes[domain] = home
    in_order = list(dict.fromkeys(homes[domain] for domain in sizes))
    return {domain: [in_order.index(homes[domain])] for domain in sizes}


def dealt_names(read: Reader, domains: Sequence[str]) -> list[str]:
    """The names of all clients in the order of their numbers; one with several own domains is called like the first."""
    names: dict[int, str] = {}
    for domain, places in owners(read, domains).items():
        for place, name in zip(places, clients_of(domain, len(places))):
            names.setdefault(place, name)
    return [names[place] for place in sorted(names)]


def load_mixed(
    read: Reader,
    client: str,
    place: int,
    domains: Sequence[str],
) -> ClientData:
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
    for client, share in zip(dealt_names(read, domains), zip(*shares), strict=True):
        train, validation = (sum(map(len, part)) for part in zip(*share))
        refuse_few(client, train, validation, CHANGE)


def _shares(
    read: Reader,
    domains: Sequence[str],
    domain: str,
    labels: np.ndarray,
) -> list[Split]:
    """Indices of every client in one of the source `domains`."""
    data, environment, split_seed = read.data, read.found.environment(domain), read.data.seed_of_splits
    homes, groups_of_images = owners(read, domains), read_groups(read, domain, len(labels))
    clients = 1 + max(max(places) for places in homes.values())
    dealt = []
    for name, indices in zip(("train", "validation"), whole_split(read, domain, labels)):
        groups = groups_of(chosen_groups(groups_of_images, indices), labels[indices])
        order = shuffled(len(groups.sizes), seed_hash(split_seed, environment, "mix", name))
        shares = _of_part(read, groups, order, round(data.mix * len(indices)), clients, homes[domain], environment)
        dealt.append([np.sort(indices[groups.images(share)]) for share in shares])
    return list(zip(*dealt))


def _of_part(
    read: Reader,
    groups: Groups,
    order: np.ndarray,
    images: int,
    clients: int,
    own: Sequence[int],
    environment: int,
) -> list[np.ndarray]:
    """The groups of every client in one part (training or validation) of a domain, which come in this order.

    images: the number of images for all clients; the others are for the clients with the numbers `own`
    environment: the number of the domain, which seeds its splits
    """
    data, classes, seed = read.data, len(read.found.classes), read.data.seed_of_splits
    common = len(groups.first(order, images))
    shares = _dealt(data, groups, order[:common], classes, clients, seed_hash(seed, "mix"))
    rest = _dealt(data, groups, order[common:], classes, len(own), seed_hash(seed, environment, "own"))
    for place, more in zip(own, rest, strict=True):
        shares[place] = np.concatenate([shares[place], more])
    return shares


def _dealt(
    data: DataSettings,
    groups: Groups,
    order: np.ndarray,
    classes: int,
    clients: int,
    seed: int,
) -> list[np.ndarray]:
    """Shuffled groups dealt to clients as `data.partition` says."""
    if data.partition == "iid":
        return deal(order, clients)
    return dirichlet_deal(order, groups.labels[order], classes, clients, data.alpha, seed, groups.sizes[order])
