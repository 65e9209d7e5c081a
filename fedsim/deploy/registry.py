"""Maps keys and nodes to sites. The server's kit alone decides which site, domain and role belong to a key.

`register` notes in `state/nodes/<site>.json` which node id the SuperLink gave to a site's key. The SuperLink lets a
node act only with that key, so a node id in a message stands for the key.
"""

import json
import logging
import time
from base64 import b64encode
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from fedsim.common.errors import UserError
from fedsim.deploy.federation import Federation, read_federation
from strategies.wire.membership import Member

LOOK_SECONDS = 1.0

logger = logging.getLogger("fedsim")


def members(federation: Federation) -> list[Member]:
    """Registered sites that the federation still lists."""
    sites = {site.name: site for site in federation.sites}
    listed = []
    for file in sorted((federation.kit("server") / "state" / "nodes").glob("*.json")):
        site = sites.get(file.stem)
        try:
            record = json.loads(file.read_text())
            if site is not None:
                key = load_ssh_public_key(str(record["key"]).encode())
                pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
                listed.append(Member(site.name, int(record["node"]), site.domain, site.role, pem))
        except (ValueError, KeyError, OSError):  # the file is being replaced, or is damaged: that site is left out
            continue
    return listed


class Registry:
    """The members of a server kit, read again when the kit's files change."""

    def __init__(self, kit: Path) -> None:
        self.kit = kit
        self._looked, self._state = -LOOK_SECONDS, (0.0, 0.0)
        self._by_key: dict[str, Member] = {}
        self._by_node: dict[int, Member] = {}

    def of_key(self, header: str) -> Member | None:
        """The member with that public key, in base64 as Flower sends it."""
        self._refresh(header in self._by_key)
        return self._by_key.get(header)

    def of_node(self, node: int) -> Member | None:
        """The member that is that node."""
        self._refresh(node in self._by_node)
        return self._by_node.get(node)

    def _refresh(self, known: bool) -> None:
        """Look at the files, unless that was done a moment ago. Who is not known may have been registered since."""
        now = time.monotonic()
        if known and now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        nodes, file = self.kit / "state" / "nodes", self.kit / "federation.toml"
        state = tuple(path.stat().st_mtime if path.exists() else 0.0 for path in (nodes, file))
        if state == self._state:
            return
        self._state = state  # type: ignore[assignment]
        try:
            registered = members(read_federation(file))
        except UserError as error:  # while the operator edits the file, the sites that were known stay known
            logger.warning("%s; the sites that were registered before stay so until it is right again", error)
            return
        self._by_key = {b64encode(each.key).decode(): each for each in registered}
        self._by_node = {each.node: each for each in registered}
