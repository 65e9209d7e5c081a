"""Fingerprints, which show whether two runs had the same data, wherever the files are."""

from collections.abc import Mapping
from itertools import product

from fedsim.common.errors import UserError
from fedsim.data.benchmarks import benchmark, resolve_domain
from fedsim.data.client_data import domain_of
from fedsim.data.reader import reader, reader_class
from fedsim.data.row import Benchmark
from fedsim.settings import DataSettings

Fingerprints = dict[str, dict[str, int | str]]


def fingerprints(data: DataSettings) -> Fingerprints:
    """{domain: {"images": count, "content": hash of files and labels, "environment": number that seeds its split}}.

    `nameless`, where it is known, is the hash of the images with their labels in any order and without names.

    It has every domain that the settings use. The number counts all domains of the data set, also those that the
    settings leave out, so that a folder that comes to the data root later can change it.
    The hash covers the names below the domain's folder, the labels and the bytes of all files, but neither the path of
    the folder nor any time. It is read from the cache when that exists. Raises UserError when the data cannot be read,
    or when two domains have the same images.
    """
    bench = benchmark(data)
    prints = {domain: fingerprint(data, domain, bench) for domain in bench.domains}
    refuse_equal_domains(bench, prints)
    return prints


def refuse_equal_domains(bench: Benchmark, prints: Mapping[str, Mapping]) -> None:
    """UserError when two domains have the same images with the same labels, so that training images would be tested.

    `prints`: fingerprints by domain, or by client ("photo/0"). The contents are compared only where they are of files:
    other readers hash what all of their domains are made of.
    """
    compared = ("content", "nameless") if reader_class(bench).own_files else ("nameless",)
    owners: dict[int | str, str] = {}
    for name, key in product(prints, compared):
        print_of_client, domain = prints[name], domain_of(name)
        first = owners.setdefault(print_of_client[key], domain) if key in print_of_client else domain
        if first != domain:
            raise UserError(
                f"the domains {first!r} and {domain!r} of {bench.title} have the same "
                f"{print_of_client['images']:,} images with the same labels; remove one of them, or leave it out by "
                "data.domains"
            )


def fingerprint(data: DataSettings, domain: str, bench: Benchmark | None = None) -> dict[str, int | str]:
    """The fingerprint of one domain, under any spelling of its name that the data set accepts."""
    bench = bench or benchmark(data)
    read, name = reader(data, bench), resolve_domain(bench, domain)
    images, seeded = len(read.labels(name)), bench.environment(name)
    facts: dict[str, int | str] = {"images": images, "content": read.fingerprint(name), "environment": seeded}
    nameless = read.nameless(name)
    return facts | ({"nameless": nameless} if nameless else {})


def difference(then: Mapping[str, Mapping], now: Mapping[str, Mapping]) -> str:
    """A text with the differences: for each domain the numbers of images, or that the content or its split differs.

    It is empty for equal data.
    Only domains that both sides know are compared.
    """
    reasons = []
    for domain in sorted(then.keys() & now.keys()):
        counts = [then[domain]["images"], now[domain]["images"]]
        numbers = [side[domain].get("environment") for side in (then, now)]  # images of the server have none
        if counts[0] != counts[1]:
            reasons.append(f"{domain}: {counts[0]:,} images then, {counts[1]:,} now")
        elif then[domain]["content"] != now[domain]["content"]:
            reasons.append(f"{domain}: {counts[0]:,} images as before, but other files, pixels or labels")
        elif numbers[0] != numbers[1]:
            reasons.append(
                f"{domain}: it was domain {numbers[0]} of all and is domain {numbers[1]} now, after domains came or "
                "went in data.root, which gives it another split"
            )
    return "; ".join(reasons[:3]) + (f" and {len(reasons) - 3} more domains" if len(reasons) > 3 else "")


def came_and_went(then: Mapping[str, Mapping], now: Mapping[str, Mapping]) -> str:
    """A text with the domains that only one side has; empty when there are none.

    It is for simulations, which record all of their domains. Without `data.domains`, a folder that comes to the data
    root is one more client.
    """
    came, went = (", ".join(sorted(a.keys() - b.keys())) for a, b in ((now, then), (then, now)))
    return "; ".join(filter(None, [came and f"new in data.root: {came}", went and f"not there any more: {went}"]))
