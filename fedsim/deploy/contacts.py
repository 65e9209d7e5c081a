"""Records when and from which address each site was last in contact, and how far its clock is ahead.

The gate writes `run/contacts.json` in the server's kit every few seconds; `fedsim deploy status` and `check` read it.
"""

import contextlib
import json
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, TypeAdapter, ValidationError

from fedsim.common.errors import UserError, printable
from fedsim.common.files import atomic_write

CONTACTS = Path("run/contacts.json")  # in the server's kit
WRITE_SECONDS = 2.0
WINDOW_SECONDS = 60.0
SWITCHES = 3  # changes of address within the window; a site that moves to another address makes one
HEARTBEATS = 6  # heartbeats within the window; one SuperNode sends three or four

Text = Annotated[str, AfterValidator(printable)]


@dataclass
class Contact:
    """What is known about one site. Times are seconds since 1970; `offset`: seconds by which its clock is ahead."""

    address: Text = ""
    since: float = 0.0  # activated
    last: float = 0.0
    offset: float = 0.0
    version: Text = ""
    bytes_up: int = 0
    bytes_down: int = 0
    refused: Text = ""  # the last refusal
    refused_at: float = 0.0
    double: Text = ""  # why two nodes seem to use this site's key
    double_at: float = 0.0
    tried: Text = ""  # the address of a SuperNode that was turned away because another one is online
    tried_at: float = 0.0  # when that began
    restarted: float = 0.0  # when the SuperNode that is admitted now was started in place of a dead one; 0: it was not


TABLE = TypeAdapter(dict[str, Contact])


@dataclass
class _Recent:
    switches: deque[float] = field(default_factory=deque)
    heartbeats: deque[float] = field(default_factory=deque)
    activated: float = 0.0


class Contacts:
    """Keeps the contacts in memory and writes them to the file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.sites: dict[str, Contact] = {}
        with contextlib.suppress(UserError):  # a damaged file is written anew
            self.sites = read_contacts(file)
        self._recent: dict[str, _Recent] = {}
        self._written = 0.0

    def seen(self, site: str, address: str, path: str, offset: float, version: str) -> str:
        """Note an authenticated request; returns why two nodes seem to use the site's key, when that is new."""
        contact, now = self.sites.setdefault(site, Contact()), time.time()
        recent = self._recent.setdefault(site, _Recent())
        if contact.address and contact.address != address:
            recent.switches.append(now)
        if path.endswith("/send-node-heartbeat"):
            recent.heartbeats.append(now)
        contact.address, contact.last, contact.offset, contact.version = address, now, round(offset, 2), version
        reason = self._doubled(contact, recent, now)
        self.write()
        return reason

    def activated(self, site: str, address: str = "") -> None:
        """A SuperNode started with the site's key. It may have been turned away until its dead predecessor was gone."""
        contact, now = self.sites.setdefault(site, Contact()), time.time()
        contact.restarted = contact.tried_at if contact.tried and contact.tried == address else 0.0
        if contact.restarted:
            contact.double, contact.double_at = "", 0.0
        contact.since, contact.tried = now, ""
        self._recent[site] = _Recent(activated=now)
        self.write(force=True)

    def second(self, site: str, address: str) -> None:
        """A second SuperNode with the site's key was turned away, because the first one is online."""
        contact = self.sites.setdefault(site, Contact())
        if contact.tried != address:
            contact.tried, contact.tried_at = address, time.time()
        self._double(contact, f"another SuperNode with its key tried to join ({address})")

    def refused(self, site: str, reason: str) -> None:
        """Note a refusal of a known site."""
        contact = self.sites.setdefault(site, Contact())
        contact.refused, contact.refused_at = reason[:300], time.time()
        self.write(force=True)

    def moved(self, site: str, up: int = 0, down: int = 0) -> None:
        """Count bytes."""
        contact = self.sites.setdefault(site, Contact())
        contact.bytes_up += up
        contact.bytes_down += down

    def write(self, force: bool = False) -> None:
        """Write the file when it is due."""
        now = time.monotonic()
        if not force and now - self._written < WRITE_SECONDS:
            return
        self._written = now
        table = {name: asdict(contact) for name, contact in self.sites.items()}
        with contextlib.suppress(OSError):  # with a full disk the table is old, but the federation continues
            atomic_write(self.file, json.dumps(table), mode=0o600)

    def _doubled(self, contact: Contact, recent: _Recent, now: float) -> str:
        for times in (recent.switches, recent.heartbeats):
            while times and now - times[0] > WINDOW_SECONDS:
                times.popleft()
        reason = ""
        if len(recent.switches) >= SWITCHES:
            reason = f"requests with its key come alternately from several addresses, {contact.address} among them"
        elif len(recent.heartbeats) >= HEARTBEATS and now - recent.activated > WINDOW_SECONDS:
            reason = f"{len(recent.heartbeats)} heartbeats within a minute: two SuperNodes use its key"
        return self._double(contact, reason) if reason else ""

    def _double(self, contact: Contact, reason: str) -> str:
        now = time.time()
        new = now - contact.double_at > WINDOW_SECONDS
        contact.double, contact.double_at = reason, now
        self.write(force=True)
        return reason if new else ""


def read_contacts(file: Path) -> dict[str, Contact]:
    """The contacts by site; empty while there are none. UserError for a damaged file."""
    try:
        return TABLE.validate_json(file.read_bytes())
    except OSError:
        return {}
    except ValidationError:
        raise UserError(f"{file} is damaged; remove it: the SuperLink writes it anew within seconds") from None
