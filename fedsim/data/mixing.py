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

from fedsim.data.client_data import ClientData, Split, clients_of, entries_at, joined, unless_square
from fedsim.data.groups import Groups, groups_of
from fedsim.data.holdout import refuse_few, stream_of, whole_split
from fedsim.data.reader import Reader, read_groups, read_images
from fedsim.data.scaling import refuse_empty_cells
from fedsim.data.splits import deal, dirichlet_deal, seed_hash, shuffled
from fedsim.settings import DataSettings

CHANGE = "data.holdout, data.fraction, data.mix or the number of clients (data.clients, data.clients_per_domain)"


def owners(read: Reader, domains: Sequence[str]) -> dict[str, list[int]]:
    """{domain: numbers of the clients whose own domain it is} for the source `domains`; clients count from 0."""
    clients = read.data.clients
    if not clients:
        counts = [read.data.clients_per_domain] * len(domains)
        return in_blocks(domains, counts)
    if isinstance(clients, dict):
        counts = [clients.get(domain, 1) for domain in domains]
        return in_blocks(domains, counts)
    sizes = {}
    for domain in domains:
        train, _ = whole_split(read, domain, read.labels(domain))
        sizes[domain] = len(train)
    if clients < len(domains):
        return domains_by_size(sizes, clients)
    counts = clients_by_size(list(sizes.values()), clients)
    return in_blocks(domains, counts)


def in_blocks(domains: Sequence[str], counts: Sequence[int]) -> dict[str, list[int]]:
    """{domain: numbers of its clients}, with so many clients for each domain, one domain after the other."""
    blocks = {}
    start = 0
    for domain, count in zip(domains, counts):
        blocks[domain] = list(range(start, start + count))
        start += count
    return blocks


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
    loads = [0] * clients
    homes = {}
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
        of_domain = clients_of(domain, len(places))
        for place, name in zip(places, of_domain):
            names.setdefault(place, name)
    return [names[place] for place in sorted(names)]


def load_mixed(
    read: Reader,
    client: str,
    place: int,
    domains: Sequence[str],
) -> ClientData:
    """Data of client number `place` (in the order of clients) of the source `domains`, one after the other.

    Raises UserError when it has fewer than two training images and one validation image, and for missing values that
    nothing replaces.
    """
    parts = []
    for domain in domains:
        images, labels = read_images(read, domain)
        refuse_empty_cells(read.data, read.found, domain, images)
        shares = _shares(read, domains, domain, labels)
        train, validation = shares[place]
        positions = np.concatenate([train, validation])
        order = np.arange(len(positions), dtype=np.int64)
        sizes = entries_at(read.sizes(domain), positions)
        masks = entries_at(read.masks(domain), positions)
        part = ClientData(
            client,
            images[positions],
            labels[positions],
            train=order[: len(train)],
            validation=order[len(train) :],
            classes=read.found.classes,
            domains=(domain,),
            domain_index=np.zeros(len(positions), np.int64),
            sizes=unless_square(sizes),
            masks=masks,
        )
        parts.append(part)
    mixture = joined(client, parts, parts)
    refuse_few(client, len(mixture.train), len(mixture.validation), CHANGE)
    return mixture


def check_mix(read: Reader, domains: Sequence[str]) -> None:
    """UserError when the mixture leaves a client with too few images; opens none."""
    counts = []  # of images that train and that validate, by domain and client
    for domain in domains:
        shares = _shares(read, domains, domain, read.labels(domain))
        counts.append([(len(train), len(validation)) for train, validation in shares])
    totals = np.sum(counts, axis=0).tolist()
    names = dealt_names(read, domains)
    for name, (train, validation) in zip(names, totals, strict=True):
        refuse_few(name, train, validation, CHANGE)


def _shares(
    read: Reader,
    domains: Sequence[str],
    domain: str,
    labels: np.ndarray,
) -> list[Split]:
    """Indices of every client in one of the source `domains`."""
    homes = owners(read, domains)
    clients = 1 + max(map(max, homes.values()))
    groups_of_images = read_groups(read, domain, len(labels))
    split = whole_split(read, domain, labels)
    stream = stream_of(read, domain)
    dealt = []
    for name, indices in zip(("train", "validation"), split):
        groups = groups_of(entries_at(groups_of_images, indices), labels[indices])
        order = shuffled(len(groups.sizes), seed_hash(*stream, "mix", name))
        images = round(read.data.mix * len(indices))
        shares = _of_part(read, groups, order, images, clients, homes[domain], stream)
        dealt.append([np.sort(indices[groups.images(share)]) for share in shares])
    return list(zip(*dealt))


def _of_part(
    read: Reader,
    groups: Groups,
    order: np.ndarray,
    images: int,
    clients: int,
    homes: Sequence[int],
    stream: tuple[int, int],
) -> list[np.ndarray]:
    """The groups of every client in one part (training or validation) of a domain, which come in this order.

    images: the number of images for all clients; the others are for the clients with the numbers `homes`
    stream: seed of splits and number of the domain
    """
    data = read.data
    classes = len(read.found.classes)
    common = groups.first(order, images)
    others = order[len(common) :]
    shares = _dealt(data, groups, common, classes, clients, seed_hash(data.seed_of_splits, "mix"))
    of_homes = _dealt(data, groups, others, classes, len(homes), seed_hash(*stream, "own"))
    for place, more in zip(homes, of_homes, strict=True):
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
    return dirichlet_deal(
        order,
        groups.labels[order],
        classes,
        clients,
        data.alpha,
        seed,
        sizes=groups.sizes[order],
    )
