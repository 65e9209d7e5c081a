"""A federation behind nginx under attack: its memory and contacts are watched."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from harness import ENVIRONMENT, HERE, SOURCES, Loopback, run_folder
from machines import Machines
from outcomes import need
from processes import command_lines, is_alive, until

from fedsim.deploy.contacts import CONTACTS, read_contacts
from fedsim.deploy.expected import EXPECTED

SITES = [f"site-{name}" for name in SOURCES]


class Attacked(Loopback):
    """A federation with an attacker; `runs` are its runs under way."""

    @property
    def server_kit(self) -> Path:
        return self.federation.kit("server")

    def ages(self) -> dict[str, float]:
        """Seconds since each site's last contact."""
        now, contacts = time.time(), read_contacts(self.server_kit / CONTACTS)
        return {site: now - contacts[site].last if site in contacts else 1e9 for site in SITES}

    def outsider(self, kind: str, *words: object) -> dict:
        """Run an attack on the attacker's machine."""
        server = (self.federation.address, self.federation.port)
        done = subprocess.run(
            [*self.inside("attacker"), sys.executable, HERE / "outsider.py", kind, *map(str, (*server, *words))],
            capture_output=True, text=True, timeout=240, env=ENVIRONMENT,
        )  # fmt: skip
        need(done.returncode == 0, done.stderr[-300:])
        return json.loads(done.stdout)

    def attempt(self, name: str, **settings: object) -> tuple[subprocess.Popen, Path]:
        """Start a run on the server's machine; returns its process and folder."""
        words = {"train.rounds": 3, "run.evaluate_target": "server", "run.timeout": 240, **settings}
        self.runs.append(self.begin(self.folder / name, **words))
        return self.runs[-1], run_folder(self.folder / name)

    def end_runs(self) -> None:
        """End what a failed attack left behind (its run, the fault of its site); the next attack would wait for it."""
        for process in self.runs:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=120)
        self.runs.clear()
        self.fault_file().unlink(missing_ok=True)

    def end_nginx(self) -> None:
        """SIGTERM to nginx, then start.sh."""
        pid = int((self.server_kit / "run" / "nginx-master.pid").read_text())
        os.kill(pid, signal.SIGTERM)
        until(lambda: not is_alive(pid), 60, "end of nginx")
        self.start("server", expect=None)


class AttackedMachines(Attacked, Machines):
    """With a network namespace for the server, every site and the attacker."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, target=False, proxy="nginx")
        self.runs = []


class Watch:
    """Measures megabytes and contacts during an attack."""

    def __init__(self, federation: Attacked) -> None:
        self.federation = federation
        self.nginx = self.app = self.link = self.oldest = 0.0
        self.base = 0.0  # memory of the server app when it has its model, before any reply
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join(10)

    def _work(self) -> None:
        kit = self.federation.server_kit
        while not self._end.wait(1.0):
            self.nginx = max(self.nginx, memory("nginx", kit))
            self.app = max(self.app, memory("flwr-serverapp", kit))
            self.link = max(self.link, memory("deploy superlink", kit))
            if not self.base and any((kit / EXPECTED).glob("*")):
                self.base = self.app
            self.oldest = max(self.oldest, *self.federation.ages().values())

    def recovered(self, most: float = 200.0) -> float:
        """Seconds from now until every site has been in contact again."""
        begin, wall = time.monotonic(), time.time()
        while time.monotonic() - begin < most:
            contacts = read_contacts(self.federation.server_kit / CONTACTS)
            if all(site in contacts and contacts[site].last > wall for site in SITES):
                return time.monotonic() - begin
            time.sleep(0.5)
        return float("nan")


def memory(program: str, kit: Path) -> float:
    """Resident megabytes of all processes of a program that work in a kit."""
    total = 0
    for pid, words in command_lines(kit).items():
        with contextlib.suppress(OSError):
            if program in words.split(" --")[0]:
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    return total / 1024
