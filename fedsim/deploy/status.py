"""`fedsim deploy status`: which sites are online, since when, their clocks, the run's progress, the last refusals."""

import json
import time
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from fedsim.common.errors import UserError, printable
from fedsim.common.values import JsonTable
from fedsim.deploy.contacts import CONTACTS, Contact, read_contacts
from fedsim.deploy.federation import Federation, Site
from fedsim.deploy.renewal import warnings

RECENT_SECONDS = 60.0
AHEAD_SECONDS, BEHIND_SECONDS = 2.0, 60.0  # beyond this a clock should be corrected; Flower's limits are 5 and 305
PROGRESS = Path("run/progress.json")


def clock_problem(offset: float) -> str:
    """What to do about a site's clock, or an empty string."""
    if -BEHIND_SECONDS <= offset <= AHEAD_SECONDS:
        return ""
    where = "ahead of" if offset > 0 else "behind"
    return f"its clock is {abs(offset):.0f} s {where} the server's (5 s ahead and 305 s behind are refused): set up NTP"


def status_table(federation: Federation, now: float | None = None) -> Group:
    """Two lines per site, from the files that the gate and the run have written, and below them what went wrong."""
    now, kit = now or time.time(), federation.kit("server")
    contacts, progress = read_contacts(kit / CONTACTS), read_progress(kit)
    title = f"{federation.name}: {describe(progress, now)}"
    names = ("site", "state, round", "contact, since", "machine, clock", "bytes")
    columns = [Column(name, no_wrap=True, overflow="fold") for name in names]
    table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=escape(printable(title)), title_justify="left")
    below: list[str] = []
    for site in federation.sites:
        contact = contacts.get(site.name, Contact())
        table.add_row(*_site_cells(site, contact, progress, now))
        below += _site_problems(site, contact, progress, now)
    lines = [Text(printable(text)) for text in [*below, *warnings(federation)]]
    return Group(table, *lines)


def _site_cells(site: Site, contact: Contact, progress: JsonTable, now: float) -> tuple[str, ...]:
    """The cells of a site, in the order of the table's columns."""
    state = "[green]connected[/]" if _here(contact, now) else "[red]silent[/]"
    status = _status_in_run(progress, site.domain)
    if status:
        state += f"\n{progress['round']}: {'ok' if status == 'ok' else 'failed'}"
    domain = escape(site.domain + (" (target)" if site.role == "target" else ""))
    return f"{site.name}\n{domain}", state, *_contact_cells(contact, now)


def _site_problems(site: Site, contact: Contact, progress: JsonTable, now: float) -> list[str]:
    """What went wrong at a site, a line each: its status in the last round, then what its contact says."""
    status = _status_in_run(progress, site.domain)
    problems = [] if status in ("", "ok") else [f"round {progress['round']}: {status}"]
    return [f"{site.name}: {text}" for text in [*problems, *_said(contact, now)]]


def _status_in_run(progress: JsonTable, domain: str) -> str:
    """What the last round of the run says of a client; empty where it did not take part."""
    return next((row["status"] for row in progress.get("clients", []) if row["client"] == domain), "")


def _here(contact: Contact, now: float) -> bool:
    return abs(now - contact.last) < RECENT_SECONDS  # a contact in the future: the clock was set back


def _contact_cells(contact: Contact, now: float) -> tuple[str, str, str]:
    """When the site was heard, from which machine, and how much went there and back."""
    if not contact.last:
        return "never", escape(contact.address) or "-", "-"
    clock = f"{contact.offset:+.1f} s"
    clock = f"[red]{clock}[/]" if clock_problem(contact.offset) else clock
    times = f"{ago(contact.last, now)}\n{ago(contact.since, now).removesuffix(' ago')}"
    machine = f"{escape(contact.address)}\n{escape(contact.version)}, {clock}"
    return times, machine, f"up {megabytes(contact.bytes_up)}\ndown {megabytes(contact.bytes_down)}"


def _said(contact: Contact, now: float) -> list[str]:
    """Who else uses the site's key, when its SuperNode was started again, and why it was refused last."""
    notes = [f"{contact.double} ({ago(contact.double_at, now)})"] if contact.double else []
    if contact.restarted:
        times = (time.strftime("%b %d %H:%M:%S", time.localtime(at)) for at in (contact.restarted, contact.since))
        notes.append("its SuperNode was started again at {}; admitted at {}".format(*times))
    return notes + ([f"last refusal: {contact.refused} ({ago(contact.refused_at, now)})"] if contact.refused else [])


def read_progress(kit: Path) -> dict[str, Any]:
    """What the run that was last seen has done so far; empty without one. UserError for a damaged file."""
    file = kit / PROGRESS
    try:
        content = json.loads(file.read_text())
        describe(content, 0.0)
        for row in content.get("clients", []):
            row["client"], row["status"]
    except OSError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{file} is damaged; remove it: the next round of a run writes it anew") from None
    return content


def describe(progress: dict[str, Any], now: float) -> str:
    """A run in one line."""
    if not progress:
        return "no run yet"
    return (
        f"{progress['name']}, round {progress['round']} of {progress['rounds']}, {progress['state']} "
        f"({ago(progress['time'], now)})"
    )


def ago(at: float, now: float) -> str:
    """A time in words."""
    if not at:
        return "never"
    if at - now > RECENT_SECONDS:
        return "in the future: this machine's clock was set back"
    seconds = max(now - at, 0.0)
    for size, word in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {word} ago"
    return f"{seconds:.0f} s ago"


def megabytes(count: int) -> str:
    """Bytes in MB."""
    return f"{count / 1e6:.1f} MB"
