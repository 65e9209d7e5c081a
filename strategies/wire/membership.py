"""Decides which node may act as which client, by the key of the node and by the number of examples it claims."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedsim.data.names import matching
from strategies.wire.update_limit import either, upper_median_of_others

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
    member, claimed = identify(node), repr(client[:LONGEST_NAME])
    if member is None:
        return f"an unknown node, which claims to be {claimed}", f"node {node} has the key of no registered site"
    if not client or member.serves(client, role):
        return "", ""
    reason = (
        f"site {member.site!r} claims to be {claimed} ({role[:LONGEST_NAME]}), "
        f"but its key is that of {member.domain!r} ({member.role})"
    )
    return f"{member.site}, which claims to be {claimed}", reason


def name_of(node: int, identify: Identify | None) -> str:
    """A text that names a node: by the name of its site if the server knows it."""
    member = identify(node) if identify else None
    return f"site {member.site!r} ({member.domain})" if member else f"node {node}"


def implausible(counts: Mapping[str, int], limit: float) -> dict[str, str]:
    """Clients that claim more than `limit` times the examples of the others' upper median, and why; none when limit is
    0. With the upper median, one site of three that claims a few examples cannot have the others refused."""
    refused, ordered = {}, sorted(counts.values())
    for client, count in counts.items() if limit else ():
        median = upper_median_of_others(ordered, count)
        if median and count > limit * median:
            times = f"{count / median:.3g} times the median of the others ({median})"
            reason = f"it reports {count} examples, {times}; run.examples_limit is {limit:g}"
            refused[client] = reason + either(len(counts))
    return refused


def missing_classes(classes: Sequence[str], counts: Mapping[str, Sequence[int]]) -> dict[str, list[str]]:
    """The classes of which a client holds no training image, by client; clients that hold all of them are left out."""
    missing = {
        client: [name for name, count in zip(classes, by_class) if not count] for client, by_class in counts.items()
    }
    return {client: names for client, names in missing.items() if names}
