"""Reads and checks the answer of a node to the handshake."""

import re
import reprlib
from dataclasses import dataclass, field
from functools import lru_cache

from flwr.app import RecordDict

from fedsim.common.errors import UserError
from fedsim.tensors.records import configs_of
from strategies.wire.reply_checks import (
    MOST_EXAMPLES,
    Expected,
    RejectedReplyError,
    check_echo,
    check_records,
    one_line,
)

UNANSWERED = 0  # node id of a client that has not answered yet


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
    frozen: str = ""  # hash of the weights that every machine builds itself; "" without any

    @property
    def content(self) -> str:
        """Hash of the site's images and labels; "" in a simulation."""
        return str(self.data.get("content", ""))


def read_sites(node: int, content: RecordDict, expected: Expected) -> list[tuple[Site, str]]:
    """The clients of a node: one, or several in a simulation. RejectedReplyError for an invalid answer."""
    more = {f"site-{number}" for number in range(1, len(configs_of(content)) - 1)}
    check_records(content, set(), set(), {"echo", "site", *more})
    check_echo(content, expected)
    sites = [read_site(node, dict(config)) for name, config in configs_of(content).items() if name != "echo"]
    names = [site.client for site, _ in sites]
    if len(set(names)) < len(names):
        raise RejectedReplyError("it names a client twice")
    return sites


def read_site(node: int, said: dict) -> tuple[Site, str]:
    """One client of a node with what it reports about itself, and the name of the data that the node holds."""
    client, role, examples, counts = (said.get(key) for key in ("client", "role", "examples", "class-counts"))
    if not isinstance(client, str) or role not in ("source", "target"):
        raise RejectedReplyError(f"it is {reprlib.repr(client)} with the role {reprlib.repr(role)}")
    if (
        not isinstance(counts, list)
        or not isinstance(examples, int)
        or any(type(count) is not int or count < 0 for count in [examples, *counts])
    ):
        raise RejectedReplyError(f"client {client!r} reports numbers of examples that are not whole numbers")
    versions = _versions(tuple((key, str(said[key])) for key in list(said)[:20] if key.startswith("version-")))
    known = ("images", "content", "environment", "nameless")
    data = {key: said[f"data-{key}"] for key in known if f"data-{key}" in said}
    numbers = type(data.get("images")) is type(data.get("environment", 0)) is int
    hashes = (str(data.get("content")), str(data.get("nameless", "0" * 20)))
    if data and not (numbers and all(re.fullmatch("[0-9a-f]{20}", each) for each in hashes)):
        raise RejectedReplyError(f"client {client!r} describes its data in a wrong form: {reprlib.repr(data)}")
    site = Site(client, node, examples, tuple(counts), versions, role, data, one_line(str(said.get("frozen", ""))))
    return site, one_line(str(said.get("holds") or client)) or "nameless"


@lru_cache(maxsize=64)
def _versions(said: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Versions by package, one table for all clients that report the same."""
    return {one_line(key.removeprefix("version-")): one_line(value) for key, value in said}


def check_site(site: Site, classes: int, frozen: str) -> None:
    """Raises UserError when a site does not fit the experiment: its classes, its numbers, or its frozen weights."""
    if site.frozen != frozen:
        raise UserError(
            f"client {site.client!r} has other frozen weights than the server, or begins with other personal ones, so "
            "that its features would differ (the server never sends them); give it the same weights file and versions "
            "of packages, and with model.head = 'text' the same names of classes"
        )
    if len(site.class_counts) != classes:
        raise UserError(f"client {site.client!r} has {len(site.class_counts)} classes, the experiment {classes}")
    if not 0 < site.examples <= MOST_EXAMPLES or sum(site.class_counts) != site.examples:
        raise UserError(f"client {site.client!r} reports {site.examples} examples but {sum(site.class_counts)} labels")
