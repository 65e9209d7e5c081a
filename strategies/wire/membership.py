"""Decides which node may act as which client, by the key of the node and by the number of examples it claims."""

from collections.abc import Callable, Mapping
from typing import Protocol


class Member(Protocol):
    """A registered site, as the server's kit knows it by its key."""

    site: str
    domain: str
    role: str

    def serves(self, client: str, role: str) -> bool:
        """May this site act as that client in that role?"""


Identify = Callable[[int], Member | None]  # whose key a node has


def impostor(node: int, client: str, role: str, identify: Identify | None) -> tuple[str, str]:
    """(the node in words, why it is refused) when it claims another role than its key has; two blanks otherwise.

    Without keys (`identify` is None) nodes are taken at their word. A node that claims no client (a spare one) is none.
    """
    if identify is None:
        return "", ""
    member = identify(node)
    if member is None:
        return f"a stranger, which poses as {client!r}", f"node {node} has no registered site's key"
    if not client or member.serves(client, role):
        return "", ""
    reason = (
        f"site {member.site!r} poses as {client!r} ({role}), but its key is that of {member.domain!r} ({member.role})"
    )
    return f"{member.site}, which poses as {client!r}", reason


def name_of(node: int, identify: Identify | None) -> str:
    """A node in words: its site's name where the server knows it."""
    member = identify(node) if identify else None
    return f"site {member.site!r} ({member.domain})" if member else f"node {node}"


def implausible(counts: Mapping[str, int], limit: float) -> dict[str, str]:
    """Clients that claim more than `limit` times the examples of the others' lower median, and why; 0: nobody."""
    refused = {}
    for client, count in counts.items() if limit else ():
        others = sorted(other for name, other in counts.items() if name != client)
        median = others[(len(others) - 1) // 2] if others else 0
        if median and count > limit * median:
            times = f"{count / median:.3g} times the median of the others ({median})"
            refused[client] = f"it says that it holds {count} examples, {times}; run.examples_limit is {limit:g}"
    return refused
