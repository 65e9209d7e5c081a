"""The data that a client, the server and a pooled baseline may load: each function loads its own domains alone."""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from fedsim.common.errors import UserError
from fedsim.common.lists import first_few
from fedsim.data.benchmarks import benchmark, resolve_domain, resolve_target
from fedsim.data.client_data import (
    ClientData,
    FullSplit,
    Split,
    clients_of,
    domain_of,
    entries_at,
    joined,
    unless_square,
)
from fedsim.data.findings import Finding
from fedsim.data.groups import adapting_groups, groups_of, partition_groups
from fedsim.data.holdout import hold_out, refuse_few, split_pool, stream_of, take_test, use_fraction, whole_split
from fedsim.data.mixing import check_mix, dealt_names, load_mixed
from fedsim.data.reader import Images, Reader, read_groups, read_images, reader
from fedsim.data.row import Benchmark
from fedsim.data.scaling import refuse_empty_cells, scale_rule, scaled_by_site
from fedsim.data.splits import classes_partition, dirichlet_partition, iid_partition, seed_hash, shuffled
from fedsim.settings import DataSettings


def client_names(data: DataSettings, target: str, bench: Benchmark | None = None) -> list[str]:
    """Source clients in sorted-domain order: "photo", or "photo/0", "photo/1", ...; see `source_domains`.

    With `data.clients` the sizes of the domains decide, so that the labels are read.
    """
    sources = source_domains(data, target, bench)
    if data.clients:
        read = reader(data, bench or benchmark(data))
        return dealt_names(read, sources)
    names = []
    for domain in sources:
        names += clients_of(domain, data.clients_per_domain)
    return names


def unseen_domains(data: DataSettings) -> list[str]:
    """Every domain that can be the unseen one: all but `run.validation_domain`, which selects the round."""
    bench = benchmark(data)
    selecting = held_out(data, bench)
    return [domain for domain in bench.domains if domain != selecting]


def held_out(data: DataSettings, bench: Benchmark) -> str:
    """The domain of `run.validation_domain`, which selects the round; empty without one."""
    return resolve_domain(bench, data.validation_domain) if data.validation_domain else ""


def source_domains(data: DataSettings, target: str, bench: Benchmark | None = None) -> list[str]:
    """The domains that are trained on, sorted: all except `target` and the one that `run.validation_domain` holds out.

    With NO_TARGET as `target` none is left out as unseen. Reads no images. `bench`: the facts of the data set, where
    they are known already. Raises UserError when `target` is not a domain, or when no domain is left.
    """
    bench = bench or benchmark(data)
    unseen = resolve_target(bench, target)
    selecting = held_out(data, bench)
    sources = [domain for domain in bench.domains if domain not in (unseen, selecting)]
    if not sources:
        without = f"without {selecting!r}, {unseen!r}" if selecting else repr(unseen)
        raise UserError(f"{without} is the only domain of {bench.title}: nothing is left to train on")
    return sources


def find_data(data: DataSettings, bench: Benchmark | None = None) -> None:
    """Raise UserError when the data set's files are not on this machine; opens no image."""
    reader(data, bench or benchmark(data)).find()


def load_client(
    data: DataSettings,
    client: str,
    target: str = "",
    bench: Benchmark | None = None,
) -> ClientData:
    """The data of one client ("photo" or "photo/1"), split into training and validation by the seed of splits.

    It loads the client's own domain only. With data.mix or data.clients above 0 it loads all source domains, and needs
    the unseen `target`. Raises UserError for an unknown client or data that cannot be read or split.
    """
    bench = bench or benchmark(data)
    domain = resolve_domain(bench, domain_of(client))
    if data.clients:
        return _load_dealt(data, client, target, bench)
    index = 0
    if data.clients_per_domain > 1:
        index = _client_index(data, client)
    elif client != domain_of(client):
        raise UserError(f"no client {client!r}: data.clients_per_domain is 1, so the client is called {domain!r}")
    read = reader(data, bench)
    if data.mix:
        sources = source_domains(data, target, bench)
        place = sources.index(domain) * data.clients_per_domain + index
        return load_mixed(read, client, place, sources)
    images, labels = read_images(read, domain)
    train, validation, test = _own_split(read, client, domain, index, labels)
    images = _own_scale(read, domain, images, train)
    return ClientData(
        client,
        images,
        labels,
        train,
        validation,
        bench.classes,
        domains=(domain,),
        domain_index=np.broadcast_to(np.int64(0), len(labels)),  # without memory for all images in each client
        sizes=unless_square(read.sizes(domain)),
        masks=read.masks(domain),
        test=test,
    )


def _load_dealt(
    data: DataSettings,
    client: str,
    target: str,
    bench: Benchmark,
) -> ClientData:
    """The data of a client where `data.clients` says how many there are; UserError for one that is not among them."""
    names = client_names(data, target, bench)
    if client not in names:
        raise UserError(f"no client {client!r}: with data.clients = {data.clients} the clients are {first_few(names)}")
    read = reader(data, bench)
    sources = source_domains(data, target, bench)
    return load_mixed(read, client, names.index(client), sources)


def _own_split(
    read: Reader,
    client: str,
    domain: str,
    index: int,
    labels: np.ndarray,
) -> FullSplit:
    """(train, validation, test) indices of a client among its domain's images with these labels.

    `index` is its number there. The test is empty without `data.source_test`.

    Raises UserError when these are too few.
    """
    data = read.data
    if data.clients_per_domain == 1 or data.split == "lists":
        split = whole_split(read, domain, labels)
    else:
        split = _split_of_part(read, client, domain, index, labels)
    seed = seed_hash(*stream_of(read, domain), index, "source test")
    train, validation, test = take_test(read, domain, labels, split, seed, client)
    change = "its lists" if data.split == "lists" else "data.holdout, data.fraction or data.clients_per_domain"
    refuse_few(client, len(train), len(validation), change)
    return train, validation, test


def _split_of_part(
    read: Reader,
    client: str,
    domain: str,
    index: int,
    labels: np.ndarray,
) -> Split:
    """(train, validation) indices of one of several clients of a domain, in its part of the images."""
    data = read.data
    stream = stream_of(read, domain)
    groups = read_groups(read, domain, len(labels))
    of_kind = data.classes_per_client if data.partition == "classes" else data.alpha
    pools = _pools(
        _SameArray(labels),
        None if groups is None else _SameArray(groups),
        data.fraction,
        (data.partition, data.clients_per_domain, of_kind),
        stream,
    )
    seed = seed_hash(*stream, index)
    return split_pool(data, labels, groups, pools[index], seed, client)


def split_of_domain(read: Reader, domain: str, labels: np.ndarray) -> Split:
    """(train, held out) indices of all clients of a domain among its images with these labels.

    Images for validation and those of `data.source_test` are held out.
    """
    names = clients_of(domain, read.data.clients_per_domain)
    splits = [_own_split(read, name, domain, index, labels) for index, name in enumerate(names)]
    train, validation, test = zip(*splits)
    return np.concatenate(train), np.concatenate([*validation, *test])


def load_target(
    data: DataSettings,
    domain: str,
    bench: Benchmark | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images uint8 [N,C,H,W], labels int64 [N] and the tested indices int64 [n] of the unseen domain.

    All images are tested (data.test_split = "all"), or DomainBed's "in" part of its random split ("in"). Where the data
    set has images that no client holds, its domain consists of these. Images of `data.adapt_share` are not tested. The
    domain of `run.validation_domain` is loaded in the same way, but nothing adapts to it: all of its images are used.
    """
    bench = bench or benchmark(data)
    domain = resolve_domain(bench, domain)
    read = reader(data, bench)
    images, labels = read_whole(read, domain)
    indices = _test_indices(read, domain, labels)
    if domain != held_out(data, bench):
        adapted = adaptation_indices(read, domain, len(images))
        indices = indices[~np.isin(indices, adapted)]
    if not len(indices):
        hint = " or name images in its test list" if data.test_split == "list" else ""
        raise UserError(f"{domain}: no image is left to be tested; lower data.adapt_share{hint}")
    return images, labels, indices


def _test_indices(read: Reader, domain: str, labels: np.ndarray) -> np.ndarray:
    """The indices int64 [n] of an unseen domain's images that `data.test_split` and `data.fraction` choose."""
    data = read.data
    stream = stream_of(read, domain)
    groups = _groups_of_target(read, domain, len(labels))
    if data.test_split == "list":
        return read.required(domain, "test")
    indices = use_fraction(labels, groups, data.fraction, seed_hash(*stream, "fraction"))
    if data.test_split == "all":
        return indices
    inside, _ = hold_out(
        labels[indices],
        entries_at(groups, indices),
        data.holdout,
        seed_hash(*stream),
        domain,
    )
    return indices[inside]


def read_whole(read: Reader, domain: str) -> Images:
    """The images and labels of a domain on which nothing trains; with data.scale = "site" scaled by its own rows."""
    images, labels = read_images(read, domain, read.found.test_apart)
    rows = np.arange(len(images))
    return _own_scale(read, domain, images, rows), labels


def read_source(read: Reader, domain: str) -> Images:
    """The images and labels of a domain that trains; with data.scale = "site" scaled by its training rows."""
    images, labels = read_images(read, domain)
    rows = np.arange(len(images))
    if scale_rule(read.data, read.found) == "site":
        rows, _ = split_of_domain(read, domain, labels)
    return _own_scale(read, domain, images, rows), labels


def _own_scale(
    read: Reader,
    domain: str,
    values: np.ndarray,
    rows: np.ndarray,
) -> np.ndarray:
    """The examples of a domain, with data.scale = "site" scaled by these rows; otherwise they are scaled later.

    Raises UserError for missing values that nothing replaces.
    """
    if scale_rule(read.data, read.found) == "site":
        return scaled_by_site(values, rows, read.found)
    refuse_empty_cells(read.data, read.found, domain, values)
    return values


def _groups_of_target(read: Reader, domain: str, count: int) -> np.ndarray | None:
    """The groups int64 [N] of the unseen domain's images; None without, and where no client holds these images."""
    return None if read.found.test_apart else read_groups(read, domain, count)


def adaptation_indices(
    read: Reader,
    domain: str,
    count: int,
    fraction: float = 1.0,
) -> np.ndarray:
    """Indices of the share `data.adapt_share` of an unseen domain's `count` images, which is never tested.

    They are drawn by the seed of splits from all positions or groups, without a look at labels. A folder and a table
    list their images by class, so that other labels give an image another position.

    fraction: the share of these images that is given, of whole groups where there are groups
    """
    groups = _groups_of_target(read, domain, count)
    images = round(read.data.adapt_share * count)
    seed = seed_hash(*stream_of(read, domain), "adaptation")
    if groups is not None:
        without_labels = np.zeros(count, np.int64)
        return adapting_groups(groups_of(groups, without_labels), images, fraction, seed, domain)
    chosen = shuffled(count, seed)[:images]
    given = max(1, round(fraction * len(chosen)))
    return chosen[:given]


def load_unlabelled(data: DataSettings, target: str) -> ClientData:
    """The images of the unseen domain for adaptation, as one client's training images; labels are -1.

    With `data.fraction` below 1 it is that share of them, drawn without using labels. UserError for fewer than two.
    """
    bench = benchmark(data)
    domain = resolve_domain(bench, target)
    read = reader(data, bench)
    images, _ = read_whole(read, domain)
    sizes = None
    if not bench.test_apart:
        sizes = unless_square(read.sizes(domain))
    chosen = adaptation_indices(read, domain, len(images), data.fraction)
    if len(chosen) < 2:
        raise UserError(f"{domain}: {len(chosen)} images to adapt to, at least 2 are needed; raise data.adapt_share")
    return ClientData(
        target,
        images,
        labels=np.full(len(images), -1, np.int64),
        train=chosen,
        validation=np.zeros(0, np.int64),
        classes=bench.classes,
        domains=(domain,),
        domain_index=np.zeros(len(images), np.int64),
        sizes=sizes,
    )


def load_target_masks(data: DataSettings, domain: str, bench: Benchmark | None = None) -> np.ndarray | None:
    """Masks uint8 [N,Q,H,W], or targets float32 [N,Q], of the images of `load_target`; None where labels are all."""
    bench = bench or benchmark(data)
    domain = resolve_domain(bench, domain)
    return reader(data, bench).masks(domain, bench.test_apart)


def check_partitions(data: DataSettings, target: str, bench: Benchmark | None = None) -> None:
    """Raises UserError when a client would have too few images to train or to validate; opens no images."""
    bench = bench or benchmark(data)
    read = reader(data, bench)
    sources = source_domains(data, target, bench)
    if data.is_dealt:
        check_mix(read, sources)
        return
    for domain in sources:
        labels = read.labels(domain)
        split_of_domain(read, domain, labels)


def count_classes(data: DataSettings, client: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The classes, and the number of images of each, in the client's whole domain; image trees are only listed."""
    bench = benchmark(data)
    domain = resolve_domain(bench, domain_of(client))
    labels = reader(data, bench).labels(domain)
    counts = np.bincount(labels, minlength=len(bench.classes))
    return bench.classes, tuple(counts.tolist())


def domain_findings(
    data: DataSettings,
    client: str,
    bench: Benchmark,
    with_files: bool = True,
) -> list[Finding]:
    """What the files of a client's domain show, where the others are on other machines.

    with_files: also what decoding the images has seen, which are decoded on first use
    """
    domain = resolve_domain(bench, domain_of(client))
    read = reader(data, replace(bench, domains=(domain,)))
    findings = read.findings()
    if with_files:
        findings = findings + read.file_findings()
    return findings


def load_pooled(data: DataSettings, target: str) -> ClientData:
    """The data of all source clients as one client named "pooled" (DeepAll, the centralized reference).

    The images are copied into memory. Splits are those of the single clients, and `domain_index` gives the domain. For
    every value of data.mix and data.clients the same images train and validate.
    """
    bench = benchmark(data)
    by_domain = data
    if data.is_dealt:  # the domains' images are held out before they are shared
        by_domain = data.model_copy(update={"mix": 0.0, "clients_per_domain": 1, "clients": 0})
    names = client_names(by_domain, target, bench)
    clients = [load_client(by_domain, name, bench=bench) for name in names]
    owners = clients
    if data.is_dealt:
        names = client_names(data, target, bench)
        owners = [load_client(data, name, target, bench) for name in names]
    parts = {client.domains[0]: client for client in clients}  # all clients of a domain have its images
    held = tuple(owner.examples for owner in owners)
    return joined("pooled", list(parts.values()), clients, held)


def _client_index(data: DataSettings, client: str) -> int:
    domain, _, index = client.partition("/")
    if not index.isdecimal() or int(index) >= data.clients_per_domain:
        last = data.clients_per_domain - 1
        raise UserError(
            f"no client {client!r}: the clients of a domain are called {domain}/0 to {domain}/{last} "
            "(data.clients_per_domain)"
        )
    return int(index)


class _SameArray:
    """An array as a key of a cache: only the same object is equal, so that no long array is compared or hashed."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __hash__(self) -> int:
        return id(self.array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameArray) and other.array is self.array


@lru_cache(maxsize=8)
def _pools(
    labels: _SameArray,
    groups: _SameArray | None,
    fraction: float,
    drawn: tuple[str, int, float],
    stream: tuple[int, int],
) -> list[np.ndarray]:
    """The images of each client of a domain, for readers that give the same arrays of labels and groups to each.

    drawn: kind of the partition, number of clients, alpha or the number of classes of a client
    stream: seed of splits and number of the domain
    """
    numbers = groups.array if groups else None
    pool = use_fraction(labels.array, numbers, fraction, seed_hash(*stream, "fraction"))
    groups_of_pool = b""
    if numbers is not None:
        groups_of_pool = numbers[pool].astype(np.int64).tobytes()
    parts = _drawn(
        labels.array[pool].astype(np.int64).tobytes(),
        groups_of_pool,
        *drawn,
        seed_hash(*stream, "partition"),
    )
    return [pool[part] for part in parts]


@lru_cache(maxsize=32)
def _drawn(
    labels: bytes,
    groups: bytes,
    kind: str,
    clients: int,
    of_kind: float,
    seed: int,
) -> list[np.ndarray]:
    """A partition, kept for the other clients of the domain in this process. groups: empty for none"""
    decoded = np.frombuffer(labels, dtype=np.int64)
    if groups:
        numbers = np.frombuffer(groups, dtype=np.int64)
        return partition_groups(groups_of(numbers, decoded), kind, clients, of_kind, seed)
    if kind == "iid":
        return iid_partition(len(decoded), clients, seed)
    if kind == "classes":
        return classes_partition(decoded, clients, int(of_kind), seed)
    return dirichlet_partition(decoded, clients, of_kind, seed)
