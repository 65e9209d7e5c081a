"""`fedsim report --live`: the report on loopback while a sweep or a deployment runs, with the state of every cell."""

import contextlib
import io
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedsim.analysis.page import page
from fedsim.common.console import Terminal, say
from fedsim.common.errors import UserError, printable
from fedsim.common.tables import Column, Row, Table
from fedsim.common.templates import fill
from fedsim.records.reading import find_runs
from fedsim.runs.claim import is_claimed
from fedsim.studies.estimate import duration
from fedsim.studies.view import STATE

Cell = dict[str, Any]
STALE_SECONDS = 60.0
HTTP_PORT = 80  # which browsers leave out in Host
NOTHING: dict[str, list[Any]] = {"experiments": [], "runs": []}


def cells_of(folder: Path) -> list[Cell]:
    """The cells of a folder: those that its sweep has noted, and every run on disk with what its folder says now.

    A run is running while a process holds its folder's lock. One that is neither finished nor running is interrupted,
    or failed where its folder has an error.txt.
    """
    noted: dict[Path, Cell] = {}
    for state in _sweeps(folder):
        alive = time.time() - state["time"] < STALE_SECONDS  # of a sweep that was killed only the failures hold
        noted |= {Path(cell["folder"]): cell for cell in state["cells"] if alive or cell["state"] == "failed"}
    try:
        runs = find_runs(folder)
    except UserError:
        runs = []
    for run in (run.resolve() for run in runs):
        cell = noted.setdefault(run, {"title": "/".join(run.parts[-3:]), "rounds": None, "reason": "", "state": ""})
        rows = run / "rounds.csv"
        cell["round"] = max(rows.read_bytes().count(b"\n") - 2, 0) if rows.is_file() else 0
        error = run / "error.txt"
        if (run / "summary.csv").is_file():
            cell["state"] = "finished"
        elif is_claimed(run):
            cell["state"] = "running"
        elif error.is_file():
            cell |= {"state": "failed", "reason": cell["reason"] or error.read_text().strip().splitlines()[-1]}
        elif cell["state"] != "failed":
            cell["state"] = "interrupted"
    return list(noted.values())


def _sweeps(folder: Path) -> list[Cell]:
    """What the sweeps of an experiment's folder, or of all in outputs/, have noted."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in (*folder.glob(STATE), *folder.glob(f"*/{STATE}"))]


def state_html(folder: Path, sites: Callable[[], str]) -> Markup:
    """The part of the page that is read anew every two seconds: counts, estimated end, cells, sites."""
    cells = cells_of(folder)
    states = [cell["state"] for cell in cells]
    counts = ", ".join(f"{states.count(name)} {name}" for name in dict.fromkeys(states)) or "no run yet"
    rows = []
    for cell in cells:
        if cell["state"] != "finished":
            last = f" of {cell['rounds']}" if cell["rounds"] else ""
            rows.append(Row([cell["title"], cell["state"], f"{cell['round']}{last}", cell["reason"]]))
    columns = [Column("Cell"), Column("state"), Column("round"), Column("reason", style="long")]
    return fill("commands/live.html", counts=counts, end=_end(folder), cells=Table(columns, rows), sites=sites())


def _end(folder: Path) -> str:
    """When the last sweep will end by its own estimate; empty without one."""
    ends = [state["time"] + state["left"] for state in _sweeps(folder) if state["left"] is not None]
    end = max(ends, default=0.0)
    left = end - time.time()
    return f"; about {duration(left)} left, until {time.strftime('%H:%M', time.localtime(end))}" if left > 0 else ""


def site_texts(federation: Path | None) -> Callable[[], str]:
    """What gives the state of every site as text; nothing without a federation."""
    if federation is None:
        return lambda: ""
    from fedsim.deploy.federation import read_federation
    from fedsim.deploy.status import status_table

    sites = read_federation(federation)

    def text() -> str:
        console = Terminal(file=io.StringIO(), width=110)
        console.print(status_table(sites))
        return console.file.getvalue()  # type: ignore[attr-defined]

    return text


class Server(ThreadingHTTPServer):
    """Serves `/`, the page, and `/state`, its part that changes; both to this machine alone.

    page: makes the report with an HTML text before its tables. It is made anew when another run has finished.
    """

    daemon_threads = True

    def __init__(self, port: int, folder: Path, page: Callable[[Markup], str], sites: Callable[[], str]) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.folder, self.page, self.sites = folder, page, sites
        self.lock = threading.Lock()
        self.made: tuple[int, str] = (-1, "")

    def finished(self) -> int:
        """The number of finished runs."""
        return sum(1 for _ in self.folder.rglob("summary.csv"))

    def document(self) -> str:
        """The page of the runs that are finished now."""
        with self.lock:
            if self.made[0] != (count := self.finished()):
                inside = state_html(self.folder, self.sites)
                state = Markup('<section id="live" data-finished="{}">{}</section>').format(count, inside)
                try:
                    text = self.page(state)
                except UserError as error:  # no run has finished yet, or they cannot be compared
                    content = state + Markup("<p>{}</p>").format(printable(str(error)))
                    text = page("fedsim: live", content, NOTHING, live=True)
                self.made = (count, text)
            return self.made[1]


class Handler(BaseHTTPRequestHandler):
    """Answers GET, to pages that this server has sent or to a person who has typed its address."""

    server: Server

    def parse_request(self) -> bool:
        """Refuse every request that does not name this server once in its header Host.

        A browser lets a page read an answer when its name led to this machine (DNS rebinding). Host then has that name.
        """
        if not super().parse_request():
            return False
        port = self.server.server_port
        names = [name + end for name in ("127.0.0.1", "localhost") for end in (f":{port}", *[""] * (port == HTTP_PORT))]
        hosts = [host.strip().lower() for host in self.headers.get_all("Host", [])]
        if len(hosts) == 1 and hosts[0] in names:
            return True
        self._answer("text/plain; charset=utf-8", f"open http://127.0.0.1:{port}/\n", 421)
        return False

    def do_GET(self) -> None:
        """The page or its state."""
        if self.path == "/":
            self._answer("text/html; charset=utf-8", self.server.document())
        elif self.path == "/state":
            state = {"html": state_html(self.server.folder, self.server.sites), "finished": self.server.finished()}
            self._answer("application/json", json.dumps(state))
        else:
            self.send_error(404)

    def _answer(self, kind: str, text: str, status: int = 200) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        with contextlib.suppress(ConnectionError):  # the browser has left
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing: a line every two seconds would bury everything else."""


def serve_live(folder: Path, page: Callable[[Markup], str], port: int, federation: Path | None) -> None:
    """Serve the report of a folder until Ctrl-C."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give outputs/ or an experiment's folder in it")
    try:
        server = Server(port, folder, page, site_texts(federation))
    except OSError as error:
        raise UserError(f"port {port} cannot be opened ({error.strerror}); choose another one with --port") from None
    with server:
        say(f"live report: http://127.0.0.1:{server.server_port}/ (Ctrl-C stops it)")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("stopped")
