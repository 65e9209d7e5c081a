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
from fedsim.data.names import matching
from fedsim.deploy.contacts import CONTACTS, Contact, read_contacts
from fedsim.deploy.federation import Federation, Site
from fedsim.deploy.renewal import warnings

RECENT_SECONDS = 60.0
AHEAD_SECONDS, BEHIND_SECONDS = 2.0, 60.0  # beyond this a clock should be corrected; Flower's limits are 5 and 305
PROGRESS = Path("run/progress.json")


def clock_problem(offset: float) -> str:
    """Returns what to do about a site's clock, or an empty string."""
    if -BEHIND_SECONDS <= offset <= AHEAD_SECONDS:
        return ""
    where = "ahead of" if offset > 0 else "behind"
    return f"its clock is {abs(offset):.0f} s {where} the server's (5 s ahead and 305 s behind are refused): set up NTP"


def status_table(federation: Federation, now: float | None = None) -> Group:
    """Returns two lines per site, from the files that the gate and the run have written, and below what went wrong."""
    now = now or time.time()
    kit = federation.kit("server")
    contacts = read_contacts(kit / CONTACTS)
    progress = read_progress(kit)
    title = printable(f"{federation.name}: {describe(progress, now)}")
    names = ("site", "state, round", "contact, since", "machine, clock", "bytes")
    columns = [Column(name, no_wrap=True, overflow="fold") for name in names]
    table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=escape(title), title_justify="left")
    problems: list[str] = []
    for site in federation.sites:
        contact = contacts.get(site.name, Contact())
        table.add_row(*_site_cells(site, contact, progress, now))
        problems += _site_problems(site, contact, progress, now)
    lines = [Text(printable(text)) for text in [*problems, *warnings(federation)]]
    return Group(table, *lines)


def _site_cells(site: Site, contact: Contact, progress: JsonTable, now: float) -> tuple[str, ...]:
    """Returns the cells of a site, in the order of the table's columns."""
    state = "[green]connected[/]" if _is_recent(contact, now) else "[red]silent[/]"
    status = _status_in_run(progress, site.domain)
    if status:
        verdict = "ok" if status == "ok" else "failed"
        state += f"\n{progress['round']}: {verdict}"
    role = " (target)" if site.role == "target" else ""
    domain = escape(site.domain + role)
    return f"{site.name}\n{domain}", state, *_contact_cells(contact, now)


def _site_problems(site: Site, contact: Contact, progress: JsonTable, now: float) -> list[str]:
    """Returns what went wrong at a site, a line each: its status in the last round, then what its contact says."""
    problems = []
    status = _status_in_run(progress, site.domain)
    if status not in ("", "ok"):
        problems.append(f"round {progress['round']}: {status}")
    problems += _contact_problems(contact, now)
    return [f"{site.name}: {text}" for text in problems]


def _status_in_run(progress: JsonTable, domain: str) -> str:
    """Returns what the last round of the run says of a site's client; empty where it did not take part.

    domain: as the federation file spells it, which may differ from the run
    """
    for row in progress.get("clients", []):
        if matching(domain, [str(row["client"])]):
            return row["status"]
    return ""


def _is_recent(contact: Contact, now: float) -> bool:
    """Whether a site was heard in the last minute."""
    return abs(now - contact.last) < RECENT_SECONDS  # a contact in the future: the clock was set back


def _contact_cells(contact: Contact, now: float) -> tuple[str, str, str]:
    """Returns when the site was heard, from which machine, and how much went there and back."""
    if not contact.last:
        return "never", escape(contact.address) or "-", "-"
    clock = f"{contact.offset:+.1f} s"
    if clock_problem(contact.offset):
        clock = f"[red]{clock}[/]"
    since = ago(contact.since, now).removesuffix(" ago")
    times = f"{ago(contact.last, now)}\n{since}"
    machine = f"{escape(contact.address)}\n{escape(contact.version)}, {clock}"
    traffic = f"up {megabytes(contact.bytes_up)}\ndown {megabytes(contact.bytes_down)}"
    return times, machine, traffic


def _contact_problems(contact: Contact, now: float) -> list[str]:
    """Returns who else uses the site's key, when its SuperNode was started again, and why it was refused last."""
    problems = []
    if contact.double:
        problems.append(f"{contact.double} ({ago(contact.double_at, now)})")
    if contact.restarted:
        restarted, admitted = clock_time(contact.restarted), clock_time(contact.since)
        problems.append(f"its SuperNode was started again at {restarted}; admitted at {admitted}")
    if contact.refused:
        problems.append(f"last refusal: {contact.refused} ({ago(contact.refused_at, now)})")
    return problems


def clock_time(at: float) -> str:
    """Returns a time as the day and the time of the clock here."""
    return time.strftime("%b %d %H:%M:%S", time.localtime(at))


def read_progress(kit: Path) -> dict[str, Any]:
    """Returns what the run that was last seen has done so far; empty without one.

    Raises UserError for a damaged file.
    """
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
    """Returns a run in one line."""
    if not progress:
        return "no run yet"
    rounds = f"round {progress['round']} of {progress['rounds']}"
    changed = ago(progress["time"], now)
    return f"{progress['name']}, {rounds}, {progress['state']} ({changed})"


def ago(at: float, now: float) -> str:
    """Returns a time in words, as one before now."""
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
    """Returns a number of bytes in MB."""
    return f"{count / 1e6:.1f} MB"
