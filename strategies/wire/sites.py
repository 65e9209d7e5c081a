"""The sites of a run: what a node says in the handshake, and which client it may be, by its key and its numbers."""

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from flwr.app import RecordDict

from fedsim.common.errors import UserError
from fedsim.common.values import Json
from fedsim.data.findings import Finding, read_findings
from fedsim.data.names import matching
from fedsim.data.scaling import Moments
from fedsim.tensors.records import configs_of
from strategies.wire.limits import Reasons, either, upper_median_of_others
from strategies.wire.reply_checks import (
    MOST_EXAMPLES,
    Expected,
    RejectedReplyError,
    check_echo,
    check_records,
    one_line,
)
from strategies.wire.scales import Answer, read_moments

MOST_VERSIONS = 100  # of packages at a site
UNANSWERED = 0  # node id of a client that has not answered yet
HASH = re.compile("[0-9a-f]{20}")


@dataclass(frozen=True)
class Site:
    """The answer of a node in the handshake."""

    client: str
    node_id: int = UNANSWERED
    examples: int = 0
    class_counts: tuple[int, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    role: str = "source"
    data: dict[str, int | str] = field(default_factory=dict)  # fingerprint of a site's data
    moments: Moments | None = None  # the sums of its training rows, where a scale is made of all clients' sums
    findings: tuple[Finding, ...] = ()  # what the files of a site show
    frozen: str = ""  # hash of the weights that every machine builds itself; "" without any
    classes: str = ""  # hash of the classes' names in their order; "" in a simulation
    features: str = ""  # likewise of the features of rows of numbers; "" also for other examples

    @property
    def content(self) -> str:
        """Hash of the site's images and labels; "" in a simulation."""
        return str(self.data.get("content", ""))


def read_sites(node: int, content: RecordDict, expected: Expected) -> list[tuple[Site, str]]:
    """The clients of a node: one, or several in a simulation. RejectedReplyError for an invalid answer."""
    configs = configs_of(content)
    further = {f"site-{number}" for number in range(1, len(configs) - 1)}
    check_records(content, set(), set(), {"echo", "site", *further})
    check_echo(content, expected)
    sites: list[tuple[Site, str]] = []
    clients: set[str] = set()
    for name, config in configs.items():
        if name != "echo":
            site, holds = read_site(node, dict(config))
            sites.append((site, holds))
            clients.add(site.client)
    if len(clients) < len(sites):
        raise RejectedReplyError("it names a client twice")
    return sites


def read_site(node: int, answer: Answer) -> tuple[Site, str]:
    """One client of a node with what it reports about itself, and the name of the data that the node holds."""
    client = answer.get("client")
    role = answer.get("role")
    if not isinstance(client, str) or role not in ("source", "target"):
        raise RejectedReplyError(f"it is {reprlib.repr(client)} with the role {reprlib.repr(role)}")
    counts = read_counts(client, answer)
    keys = [key for key in answer if key.startswith("version-")]
    if len(keys) > MOST_VERSIONS:
        raise RejectedReplyError(
            f"client {client!r} reports {len(keys)} versions of packages, and {MOST_VERSIONS} are the most"
        )
    versions = tuple((key, str(answer[key])) for key in keys)
    data = read_fingerprint(client, answer)
    frozen = one_line(str(answer.get("frozen", "")))
    holds = one_line(str(answer.get("holds") or client))
    try:
        moments = read_moments(answer)
        findings = read_findings(client, answer.get("findings", []))
    except ValueError as error:
        raise RejectedReplyError(f"client {client!r}: {error}") from None
    site = Site(
        client=client,
        node_id=node,
        examples=answer["examples"],
        class_counts=counts,
        versions=_versions(versions),
        role=role,
        data=data,
        moments=moments,
        findings=findings,
        frozen=frozen,
        classes=one_line(str(answer.get("classes", ""))),
        features=one_line(str(answer.get("features", ""))),
    )
    return site, holds or "nameless"


def read_counts(client: str, answer: Answer) -> tuple[int, ...]:
    """The client's numbers of examples by class; RejectedReplyError unless they and `examples` are whole numbers."""
    examples = answer.get("examples")
    counts = answer.get("class-counts")
    if isinstance(counts, list) and all(is_count(number) for number in [examples, *counts]):
        return tuple(counts)
    raise RejectedReplyError(f"client {client!r} reports numbers of examples that are not whole numbers")


def is_count(number: Json) -> bool:
    """Whether this is a whole number that is not negative."""
    return type(number) is int and number >= 0


def read_fingerprint(client: str, answer: Answer) -> dict[str, int | str]:
    """What a site says of its data, as fedsim.data.fingerprint makes it; empty in a simulation."""
    data: dict[str, int | str] = {}
    for key in ("images", "content", "environment", "nameless"):
        if f"data-{key}" in answer:
            data[key] = answer[f"data-{key}"]
    if data and not is_fingerprint(data):
        raise RejectedReplyError(f"client {client!r} describes its data in a wrong form: {reprlib.repr(data)}")
    return data


def is_fingerprint(data: Mapping[str, Json]) -> bool:
    """Whether these are the numbers and hashes of a fingerprint; `environment` and `nameless` may be missing."""
    numbers = (data.get("images"), data.get("environment", 0))
    hashes = (data.get("content"), data.get("nameless", "0" * 20))
    has_numbers = all(type(number) is int for number in numbers)
    return has_numbers and all(HASH.fullmatch(str(text)) for text in hashes)


@lru_cache(maxsize=64)
def _versions(versions: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Versions by package, one table for all clients that report the same."""
    table: dict[str, str] = {}
    for key, version in versions:
        package = one_line(key.removeprefix("version-"))
        table[package] = one_line(version)
    return table


def check_site(site: Site, classes: int, frozen: str) -> None:
    """Raises UserError when a site does not fit the experiment: its classes, its numbers, or its frozen weights.

    classes: how many there are; 0 where clients do not say what they hold, so that their numbers are not compared
    """
    if site.frozen != frozen:
        raise UserError(
            f"client {site.client!r} has other frozen weights than the server, or begins with other personal ones, so "
            "that its features would differ (the server never sends them); give it the same weights file and versions "
            "of packages, and with model.head = 'text' the same names of classes"
        )
    if not classes:
        return
    if len(site.class_counts) != classes:
        raise UserError(f"client {site.client!r} has {len(site.class_counts)} classes, the experiment {classes}")
    labels = sum(site.class_counts)
    if not 0 < site.examples <= MOST_EXAMPLES or labels != site.examples:
        raise UserError(f"client {site.client!r} reports {site.examples} examples but {labels} labels")


REMEDIES = {
    "classes": "name all in data.classes",
    "features": "name all in data.columns.features, and all categories in data.columns.categories",
}


def check_names(site: Site, names: Mapping[str, str]) -> None:
    """Raises UserError when a site's classes, or its features, are not those of the server in the same order.

    names: the server's hashes of both, of which an empty one is not compared
    """
    for kind, remedy in REMEDIES.items():
        here, there = names.get(kind, ""), getattr(site, kind)
        if here and there and here != there:
            raise UserError(
                f"client {site.client!r} has other {kind} than the server, or has them in another order, so that one "
                f"number would mean two things; {remedy}, and correct the data that differ"
            )


LONGEST_NAME = 100  # characters of a name that a node claims, in messages


@dataclass(frozen=True)
class Member:
    """A registered site: name, node at the SuperLink, domain, role, and key as the SuperLink reads it."""

    site: str
    node: int
    domain: str
    role: str
    key: bytes

    def serves(self, client: str, role: str) -> bool:
        """Whether this site may act as that client in that role; as in all domain names, case does not matter."""
        return role == self.role and matching(self.domain, [client]) is not None


Identify = Callable[[int], Member | None]  # the registered site to which the key of a node belongs


def impostor(node: int, client: str, role: str, identify: Identify | None) -> tuple[str, str]:
    """(text that names the node, why it is refused) when its key has another role than it claims; else two empty texts.

    Without keys (`identify` is None) the claims of nodes are accepted. A node that claims no client (a spare one) is
    never refused here.
    """
    if identify is None:
        return "", ""
    member = identify(node)
    claim = f"claims to be {client[:LONGEST_NAME]!r}"
    if member is None:
        return f"an unknown node, which {claim}", f"node {node} has the key of no registered site"
    if not client or member.serves(client, role):
        return "", ""
    claimed_role = role[:LONGEST_NAME]
    owner = f"{member.domain!r} ({member.role})"
    reason = f"site {member.site!r} {claim} ({claimed_role}), but its key is that of {owner}"
    return f"{member.site}, which {claim}", reason


def name_of(node: int, identify: Identify | None) -> str:
    """A text that names a node: by the name of its site if the server knows it."""
    member = identify(node) if identify else None
    if member is None:
        return f"node {node}"
    return f"site {member.site!r} ({member.domain})"


def implausible(counts: Mapping[str, int], limit: float) -> Reasons:
    """Clients that claim more than `limit` times the examples of the others' upper median, and why; none when limit is
    0. With the upper median, one site of three that claims a few examples cannot have the others refused."""
    if not limit:
        return {}
    refused: Reasons = {}
    ordered = sorted(counts.values())
    for client, count in counts.items():
        median = upper_median_of_others(ordered, count)
        if median and count > limit * median:
            times = f"{count / median:.3g} times the median of the others ({median})"
            reason = f"it reports {count} examples, {times}; run.examples_limit is {limit:g}"
            refused[client] = reason + either(len(counts))
    return refused


def missing_classes(classes: Sequence[str], counts: Mapping[str, Sequence[int]]) -> dict[str, list[str]]:
    """The classes of which a client holds no training image, by client; clients that hold all of them are left out."""
    missing: dict[str, list[str]] = {}
    for client, by_class in counts.items():
        names = [name for name, count in zip(classes, by_class) if not count]
        if names:
            missing[client] = names
    return missing
