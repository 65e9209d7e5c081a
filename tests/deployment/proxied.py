"""A federation behind nginx in network namespaces, with an attacker's machine; its memory and contacts are watched."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from harness import ENVIRONMENT, SOURCES, Loopback, command, run_folder
from lanes import VICTIM, need
from test_namespaces import SERVER, Machines, ip

from fedsim.deploy.contacts import CONTACTS, read_contacts
from fedsim.deploy.expected import EXPECTED

OUTSIDER, PORT = Path(__file__).with_name("outsider.py"), "9092"
SITES = [f"site-{name}" for name in SOURCES]


class Federation(Machines):
    """A server behind nginx, three source sites and one attacker."""

    def __init__(self, folder: Path) -> None:
        settings = {"address": SERVER, "listen": "0.0.0.0", "port": 9092, "proxy": "nginx"}
        Loopback.__init__(self, folder, target=False, settings=settings, warm=False)
        self.runs: list[subprocess.Popen] = []

    def build(self) -> None:
        """Create all machines, including the attacker's."""
        super().build()
        bridge, own = self.namespace("server"), self.namespace("attacker")
        ip("netns", "add", own)
        ip("-n", own, "link", "set", "lo", "up")
        ip("link", "add", "v99", "netns", bridge, "type", "veth", "peer", "name", "eth0", "netns", own)
        ip("-n", bridge, "link", "set", "v99", "master", "br0", "up")
        ip("-n", own, "addr", "add", "10.77.0.99/24", "dev", "eth0")
        ip("-n", own, "link", "set", "eth0", "up")

    def remove(self) -> None:
        """Remove all machines."""
        super().remove()
        subprocess.run(["ip", "netns", "del", self.namespace("attacker")], capture_output=True)

    @property
    def server_kit(self) -> Path:
        return self.federation.kit("server")

    def ages(self) -> dict[str, float]:
        """Seconds since each site's last contact."""
        now, contacts = time.time(), read_contacts(self.server_kit / CONTACTS)
        return {site: now - contacts[site].last if site in contacts else 1e9 for site in SITES}

    def outsider(self, *words: object) -> dict:
        """Run an attack on the attacker's machine."""
        done = subprocess.run(
            [*self.inside("attacker"), sys.executable, OUTSIDER, *map(str, words)],
            capture_output=True, text=True, timeout=240, env=ENVIRONMENT,
        )  # fmt: skip
        need(done.returncode == 0, done.stderr[-300:])
        return json.loads(done.stdout)

    def begin(self, name: str, rounds: int = 3, **settings: object) -> tuple[subprocess.Popen, Path]:
        """Start a run on the server's machine; returns its process and folder."""
        output = self.folder / name
        words = {
            "train.rounds": rounds,
            "run.evaluate_target": "server",
            "run.timeout": 240,
            "run.runtime": "deployment",
        }
        run = command(output, "fedavg", **{**words, "run.federation": self.file, **settings})
        process = subprocess.Popen(
            [*self.inside("server"), *run], cwd=self.folder, env=ENVIRONMENT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.runs.append(process)
        return process, run_folder(output)

    def end_runs(self) -> None:
        """End what a failed attack left behind (its run, the fault of its site); the next attack would wait for it."""
        for process in self.runs:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=120)
        self.runs.clear()
        self.fault_file(f"site-{VICTIM}").unlink(missing_ok=True)

    def break_site(self, kind: str, round_: int = 2, **more: object) -> None:
        """Damage the victim's next reply in that round."""
        fault = {"kind": kind, "round": round_, "once": True, "seconds": 0, **more}
        self.fault_file(f"site-{VICTIM}").write_text(json.dumps(fault))


@dataclass
class Watch:
    """Measures memory and contacts during an attack."""

    federation: Federation
    nginx: float = 0.0
    app: float = 0.0
    link: float = 0.0
    base: float = 0.0  # memory of the server app when it has its model, before any reply
    oldest: float = 0.0
    _end: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Watch":
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join(10)

    def _work(self) -> None:
        while not self._end.wait(1.0):
            self.nginx = max(self.nginx, memory("nginx", self.federation.server_kit))
            self.app = max(self.app, memory("flwr-serverapp", self.federation.server_kit))
            self.link = max(self.link, memory("deploy superlink", self.federation.server_kit))
            if not self.base and any((self.federation.server_kit / EXPECTED).glob("*")):
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
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if program not in words.split(" --")[0] or not (process / "cwd").readlink().is_relative_to(kit):
                continue
            total += next(
                int(line.split()[1])
                for line in (process / "status").read_text().splitlines()
                if line.startswith("VmRSS")
            )
        except (OSError, StopIteration):
            continue
    return total / 1024


def wait(condition: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        need(time.monotonic() < until, "waited in vain")
        time.sleep(0.3)
