"""Fingerprints, which show whether two runs had the same data, wherever the files are."""

from collections.abc import Mapping
from itertools import product

from fedsim.common.errors import UserError
from fedsim.data.benchmarks import benchmark, resolve_domain
from fedsim.data.client_data import domain_of
from fedsim.data.reader import reader, reader_class
from fedsim.data.row import Benchmark
from fedsim.settings import DataSettings

MOST_REASONS = 3  # of which a text on differences has the words
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
    compared = ["nameless"]
    if reader_class(bench).own_files:
        compared = ["content", "nameless"]
    owners: dict[int | str, str] = {}
    for name, key in product(prints, compared):
        print_of_client = prints[name]
        if key not in print_of_client:
            continue
        domain = domain_of(name)
        first = owners.setdefault(print_of_client[key], domain)
        if first != domain:
            examples = f"{print_of_client['images']:,} {bench.unit}"
            raise UserError(
                f"the domains {first!r} and {domain!r} of {bench.title} have the same {examples} with the same labels; "
                "remove one of them, or leave it out by data.domains"
            )


def fingerprint(data: DataSettings, domain: str, bench: Benchmark | None = None) -> dict[str, int | str]:
    """The fingerprint of one domain, under any spelling of its name that the data set accepts."""
    bench = bench or benchmark(data)
    read = reader(data, bench)
    name = resolve_domain(bench, domain)
    facts: dict[str, int | str] = {
        "images": len(read.labels(name)),
        "content": read.fingerprint(name),
        "environment": bench.environment(name),
    }
    nameless = read.nameless(name)
    if nameless:
        facts["nameless"] = nameless
    return facts


def difference(then: Mapping[str, Mapping], now: Mapping[str, Mapping]) -> str:
    """A text with the differences: for each domain the numbers of images, or that the content or its split differs.

    It is empty for equal data.
    Only domains that both sides know are compared.
    """
    reasons = []
    for domain in sorted(then.keys() & now.keys()):
        reason = _difference_of_prints(then[domain], now[domain])
        if reason:
            reasons.append(f"{domain}: {reason}")
    text = "; ".join(reasons[:MOST_REASONS])
    more = len(reasons) - MOST_REASONS
    if more > 0:
        text += f" and {more} more domains"
    return text


def _difference_of_prints(then: Mapping, now: Mapping) -> str:
    """In what two fingerprints of a domain differ, in words; empty for equal ones."""
    images = then["images"]
    if images != now["images"]:
        return f"{images:,} images then, {now['images']:,} now"
    if then["content"] != now["content"]:
        return f"{images:,} images as before, but other files, pixels or labels"
    numbers = [side.get("environment") for side in (then, now)]  # images of the server have none
    if numbers[0] != numbers[1]:
        return (
            f"it was domain {numbers[0]} of all and is domain {numbers[1]} now, after domains came or "
            "went in data.root, which gives it another split"
        )
    return ""


def came_and_went(then: Mapping[str, Mapping], now: Mapping[str, Mapping]) -> str:
    """A text with the domains that only one side has; empty when there are none.

    It is for simulations, which record all of their domains. Without `data.domains`, a folder that comes to the data
    root is one more client.
    """
    came = sorted(now.keys() - then.keys())
    went = sorted(then.keys() - now.keys())
    clauses = []
    if came:
        clauses.append(f"new in data.root: {', '.join(came)}")
    if went:
        clauses.append(f"not there any more: {', '.join(went)}")
    return "; ".join(clauses)
