"""Before round 1 every node says which client it is; nobody trains until all expected clients have answered."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedsim.errors import USER_ERROR, ClientFailedError, UserError

POLL_SECONDS = 1.0
MOST_EXAMPLES = 10**9


@dataclass(frozen=True)
class Site:
    """What a node said in the handshake."""

    client: str
    node_id: int
    examples: int
    class_counts: tuple[int, ...]
    versions: dict[str, str]


def handshake(
    grid: Grid, expected: Sequence[str], classes: int, run_config: dict[str, str], timeout: float
) -> dict[str, Site]:
    """Sites of all expected clients, in their order; a bounded wait that ends by naming who is missing."""
    deadline = time.monotonic() + timeout
    sites: dict[str, Site] = {}
    asked: set[int] = set()
    while True:
        fresh = [node for node in grid.get_node_ids() if node not in asked]
        asked.update(fresh)
        if fresh:
            sites |= _ask(grid, fresh, run_config, max(deadline - time.monotonic(), 1.0))
        missing = [client for client in expected if client not in sites]
        if not missing:
            return {client: _checked(sites[client], classes) for client in expected}
        if time.monotonic() > deadline:
            raise ClientFailedError(
                f"no node for {', '.join(missing)} within {timeout:g} s ({len(asked)} nodes answered)"
            )
        time.sleep(POLL_SECONDS)


def _ask(grid: Grid, nodes: Sequence[int], run_config: dict[str, str], timeout: float) -> dict[str, Site]:
    content = RecordDict({"config": ConfigRecord({**run_config, "round": 0, "phase": "handshake", "client": ""})})
    messages = [Message(content, node, "query.handshake") for node in nodes]
    sites = {}
    for reply in grid.send_and_receive(messages, timeout=timeout):
        if reply.has_error():
            reason = str(reply.error.reason)
            if USER_ERROR in reason:
                raise UserError(reason.split(USER_ERROR, 1)[1].strip())
            raise ClientFailedError(f"a node failed in the handshake:\n{reason.rstrip()}")
        said = reply.content.config_records["site"]
        if said["client"]:
            versions = {
                key.removeprefix("version-"): str(value) for key, value in said.items() if key.startswith("version-")
            }
            site = Site(
                str(said["client"]),
                reply.metadata.src_node_id,
                int(said["examples"]),
                tuple(said["class-counts"]),
                versions,
            )
            if site.client in sites:
                raise UserError(f"two nodes say that they are {site.client!r}; every client needs one node")
            sites[site.client] = site
    return sites


def _checked(site: Site, classes: int) -> Site:
    if len(site.class_counts) != classes:
        raise UserError(f"client {site.client!r} has {len(site.class_counts)} classes, the experiment {classes}")
    if not 0 < site.examples <= MOST_EXAMPLES or sum(site.class_counts) != site.examples:
        raise UserError(f"client {site.client!r} says {site.examples} examples and {sum(site.class_counts)} labels")
    return site
