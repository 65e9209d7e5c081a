"""Attacks on a federation whose server, sites and attacker have a network namespace each, and what came of them.

    PYTHONPATH=tests:tests/deployment python tests/deployment/attacks.py [--only WORDS]

Needs root, `ip` and nginx. Each row: what happened, seconds until all sites were connected again, and the most memory
that nginx and the server app took. Everything is bounded, stays in the namespaces, and ends by itself.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from harness import ENVIRONMENT, SOURCES, Loopback, command, run_folder
from lanes import VICTIM, need
from test_namespaces import SERVER, Machines, ip

from fedsim.deploy.audit import AUDIT, read_audit
from fedsim.deploy.certificates import write_server_certificate
from fedsim.deploy.contacts import CONTACTS, read_contacts
from fedsim.deploy.control import registered_nodes, reload_proxy
from fedsim.deploy.renewal import renew

SUBMIT = Path(__file__).with_name("submit.py")
OUTSIDER, PORT, FRESH_SECONDS = Path(__file__).with_name("outsider.py"), "9092", 25.0
SITES = [f"site-{name}" for name in SOURCES]


class Federation(Machines):
    """Server behind nginx, three source sites, one attacker."""

    def __init__(self, folder: Path) -> None:
        settings = {"address": SERVER, "listen": "0.0.0.0", "port": 9092, "proxy": "nginx"}
        Loopback.__init__(self, folder, target=False, settings=settings, warm=False)

    def build(self) -> None:
        """Also the attacker's machine."""
        super().build()
        bridge, own = self.namespace("server"), self.namespace("attacker")
        ip("netns", "add", own)
        ip("-n", own, "link", "set", "lo", "up")
        ip("link", "add", "v99", "netns", bridge, "type", "veth", "peer", "name", "eth0", "netns", own)
        ip("-n", bridge, "link", "set", "v99", "master", "br0", "up")
        ip("-n", own, "addr", "add", "10.77.0.99/24", "dev", "eth0")
        ip("-n", own, "link", "set", "eth0", "up")

    def remove(self) -> None:
        """All of them."""
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
        """Start a run on the server's machine; its process and folder."""
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
        return process, run_folder(output)

    def break_site(self, kind: str, round_: int = 2, **more: object) -> None:
        """The victim's next reply of that round."""
        fault = {"kind": kind, "round": round_, "once": True, "seconds": 0, **more}
        self.fault_file(f"site-{VICTIM}").write_text(json.dumps(fault))


@dataclass
class Watch:
    """Samples memory and contacts while an attack goes on."""

    federation: Federation
    nginx: float = 0.0
    app: float = 0.0
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


def slow_connections(federation: Federation, watch: Watch) -> str:
    """1,000 at a time from one machine."""
    said = federation.outsider("slow", SERVER, PORT, 1000, 60)
    need(watch.oldest < FRESH_SECONDS, f"a site was silent for {watch.oldest:.0f} s; {said}")
    return f"{said}; longest silence of a site {watch.oldest:.0f} s"


def unauthenticated_bodies(federation: Federation, watch: Watch) -> str:
    """40 of 15 MB without a key."""
    said = federation.outsider("bodies", SERVER, PORT, 40, 15)
    need(watch.oldest < FRESH_SECONDS and watch.nginx < 200, f"{watch.oldest:.0f} s, {watch.nginx:.0f} MB; {said}")
    return f"{said}; longest silence of a site {watch.oldest:.0f} s"


def flood(federation: Federation, watch: Watch) -> str:
    """Requests without a key as fast as they go."""
    said = federation.outsider("flood", SERVER, PORT, 1500)
    need(watch.oldest < FRESH_SECONDS and "200" not in said, f"{said} {watch.oldest}")
    return f"{said}; longest silence of a site {watch.oldest:.0f} s"


def stolen_key(federation: Federation, watch: Watch) -> str:
    """A second machine with a site's key, while the site is online."""
    node, key = registered_nodes(federation.federation)[SITES[1]], federation.federation.kit(SITES[1]) / "key"
    said = federation.outsider("steal", SERVER, PORT, key, node, 30)
    lines = [line for line in read_audit(federation.server_kit / AUDIT) if line["event"] == "double"]
    need(lines and lines[-1]["site"] == SITES[1], f"nothing was said; {said}")
    return f"said in audit log, check and status: {lines[-1]['reason']}"


def forgeries(federation: Federation, watch: Watch) -> str:
    """A reply in another's name; a signature used twice."""
    nodes = registered_nodes(federation.federation)
    key = federation.federation.kit(SITES[1]) / "key"
    said = federation.outsider("forge", SERVER, PORT, key, nodes[SITES[1]], nodes[SITES[0]])
    answers = (said["another's reply"][0], said["signature"], said["signature again"])
    need(answers == (400, 200, 503), f"{said}")
    detail = json.loads(said["another's reply"][1])["detail"]
    return f"refused: {detail}; second use of a signature: 503"


def wrong_clock(federation: Federation, watch: Watch) -> str:
    """12 s ahead."""
    status, said = federation.outsider("clock", SERVER, PORT, federation.federation.kit(SITES[1]) / "key", 12)["answer"]
    need(status == 400 and "12 s ahead" in said, f"{status} {said}")
    return json.loads(said)["detail"]


def bad_reply(kind: str, reason: str, **fault: object) -> Callable[[Federation, Watch], str]:
    """A registered site whose reply of round 2 is an attack; the others' round goes on."""

    def attack(federation: Federation, watch: Watch) -> str:
        federation.break_site(kind, **fault)
        process, folder = federation.begin(f"bad-{kind}", **{"run.on_client_failure": "continue"})
        _, said = process.communicate(timeout=500)
        need(process.returncode == 0, said[-300:])
        clients = pd.read_csv(folder / "clients.csv").set_index(["round", "client"])
        status = str(clients.loc[(2, VICTIM), "status"])
        need(reason in status and clients.loc[3, "status"].eq("ok").all(), status)
        rounds = pd.read_csv(folder / "rounds.csv")
        return f"exit 0; refused: {status[:120]}; server app {watch.app:.0f} MB; {len(rounds) - 1} rounds"

    return attack


def absurd_count(federation: Federation, watch: Watch) -> str:
    """10^9 examples in the handshake."""
    federation.break_site("examples", round_=0, phase="handshake")
    process, _ = federation.begin("examples")
    _, said = process.communicate(timeout=400)
    need(process.returncode == 2 and "1000000000 examples" in said, f"{process.returncode} {said[-300:]}")
    return f"exit 2: {said.strip().splitlines()[-1][:150]}"


def impostor(federation: Federation, watch: Watch) -> str:
    """A registered site that claims another's domain: refused, and the honest run goes on (continue)."""
    env = federation.federation.kit("site-rot30") / "site.env"
    honest = env.read_text()
    federation.stop("site-rot30")
    env.write_text(honest.replace("DOMAIN=rot30", "DOMAIN=rot0"))
    federation.start("site-rot30", expect=None)
    try:
        more = {"run.on_client_failure": "continue", "run.wait_for_sites": 40}
        process, folder = federation.begin("impostor", 2, **more)
        _, said = process.communicate(timeout=400)
        log = (folder / "run.log").read_text()
    finally:
        federation.stop("site-rot30")
        env.write_text(honest)
        federation.start("site-rot30", expect=None)
    need(process.returncode == 0 and "site 'site-rot30' claims to be 'rot0'" in log, said[-300:] + log[-300:])
    return "exit 0 without it; log: site 'site-rot30' claims to be 'rot0', but its key is that of 'rot30'"


def cut(federation: Federation, watch: Watch) -> str:
    """The victim's link is down for 45 s in round 2, with "stop"."""
    federation.break_site("slow", seconds=15)
    process, folder = federation.begin("cut")
    wait(lambda: not federation.fault_file(f"site-{VICTIM}").exists(), 200)
    bridge = federation.namespace("server")
    ip("-n", bridge, "link", "set", f"v{2 + SITES.index(f'site-{VICTIM}')}", "down")
    time.sleep(45)
    ip("-n", bridge, "link", "set", f"v{2 + SITES.index(f'site-{VICTIM}')}", "up")
    _, said = process.communicate(timeout=600)
    need(process.returncode == 0, said[-400:])
    need(set(pd.read_csv(folder / "clients.csv")["status"]) == {"ok"}, "replies were lost")
    return "exit 0, no reply lost"


def busy_database(federation: Federation, watch: Watch) -> str:
    """The SuperLink's database is locked for 90 s: its answers become errors."""
    code = (
        "import sqlite3, sys, time\nconnection = sqlite3.connect(sys.argv[1], timeout=30)\n"
        "connection.execute('BEGIN EXCLUSIVE')\ntime.sleep(90)"
    )
    subprocess.run(
        [sys.executable, "-c", code, federation.server_kit / "state" / "superlink.db"], timeout=150, check=True
    )
    seconds = watch.recovered()
    need(seconds == seconds, f"{federation.ages()}")
    return f"sites try again; all in contact {seconds:.0f} s after the end"


def hanging_supernode(federation: Federation, watch: Watch) -> str:
    """SIGSTOP of a SuperNode: it lives and does nothing."""
    pid = federation.pid(SITES[1])
    os.kill(pid, signal.SIGSTOP)
    seconds = watch.recovered(420)
    need(seconds == seconds and federation.pid(SITES[1]) != pid, f"{federation.ages()}")
    return f"ended and started again by its supervisor, connected after {seconds:.0f} s"


def expired_certificate(federation: Federation, watch: Watch) -> str:
    """The server's certificate runs out; `fedsim deploy renew` brings it back without restarts."""
    kit, described = federation.server_kit, federation.federation
    for name in ("server.key", "server.pem"):
        (kit / name).unlink()
    ca = (described.kit("operator") / "ca.key", kit / "ca.crt")
    write_server_certificate("demo", described.server_names, -0.02, ca, (kit / "server.key", kit / "server.pem"))
    reload_proxy(described)
    federation.stop(SITES[1])
    said = federation.start(SITES[1], expect=None).stdout
    renew(described)
    seconds = watch.recovered()
    need("has expired" in said and seconds == seconds, f"{said} {seconds}")
    return f"a site that starts says: {said.strip()[-110:]}; after renew all in contact within {seconds:.0f} s"


def foreign_app(federation: Federation, watch: Watch) -> str:
    """The operator submits an app of his own, which reads the sites' keys."""
    app = federation.folder / "foreign"
    (app / "foreign").mkdir(parents=True)
    (app / "foreign" / "__init__.py").write_text(
        "from flwr.app import ConfigRecord, Message, RecordDict\nfrom flwr.clientapp import ClientApp\n"
        "from flwr.serverapp import ServerApp\nserver = ServerApp()\nclient = ClientApp()\n"
        "@client.query()\ndef read(message, context):\n"
        "    return Message(RecordDict({'key': ConfigRecord({'key': open('key').read()})}), reply_to=message)\n"
        "@server.main()\ndef main(grid, context):\n"
        "    messages = [Message(RecordDict(), node, 'query') for node in grid.get_node_ids()]\n"
        "    replies = grid.send_and_receive(messages, timeout=60)\n"
        "    raise RuntimeError('stolen: %d of %d' % (sum(r.has_content() for r in replies), len(messages)))\n"
    )
    (app / "pyproject.toml").write_text(
        '[project]\nname = "foreign"\nversion = "0.1.0"\ndescription = "x"\nlicense = "Apache-2.0"\n'
        '[tool.flwr.app]\npublisher = "x"\n[tool.flwr.app.components]\nserverapp = "foreign:server"\n'
        'clientapp = "foreign:client"\n[tool.flwr.app.config]\n'
    )
    done = subprocess.run(
        [*federation.inside("server"), sys.executable, SUBMIT, federation.file, app],
        capture_output=True, text=True, timeout=240, env=ENVIRONMENT,
    )  # fmt: skip
    need("stolen: 0 of 3" in done.stdout, (done.stdout + done.stderr)[-400:])
    return "no site ran it (pinned bundles): replies with keys: 0 of 3"


def wait(condition: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        need(time.monotonic() < until, "waited in vain")
        time.sleep(0.3)


ATTACKS: dict[str, Callable[[Federation, Watch], str]] = {
    "1,000 slow connections from one machine, 60 s": slow_connections,
    "40 bodies of 15 MB without a key": unauthenticated_bodies,
    "1,500 requests without a key": flood,
    "stolen key beside the original": stolen_key,
    "reply in another's name, replayed signature": forgeries,
    "clock 12 s ahead": wrong_clock,
    "3e38 in every weight": bad_reply("values", "times the median"),
    "reply of 500 MB": bad_reply("huge", "larger than", megabytes=500),
    "10^9 examples": absurd_count,
    "site claims to be another": impostor,
    "operator's app reads keys": foreign_app,
    "database locked for 90 s": busy_database,
    "server certificate expired": expired_certificate,
    "link cut for 45 s in round 2 (stop)": cut,
    "SuperNode hangs": hanging_supernode,
}


def main() -> int:
    """Attack, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="attacks whose name contains one of these words, by commas")
    words = parser.parse_args()
    need(os.geteuid() == 0 and shutil.which("ip"), "needs root and ip (iproute2)")
    rows = []
    with tempfile.TemporaryDirectory(prefix="attacks-") as folder:
        federation = Federation(Path(folder))
        federation.build()
        try:
            with federation:
                for name in [name for name in ATTACKS if any(word in name for word in words.only.split(","))]:
                    rows.append((name, *one(federation, name)))
                    print("| " + " | ".join(rows[-1]) + " |", flush=True)
        finally:
            federation.remove()
    return 0 if all(row[-1] == "yes" for row in rows) else 1


def one(federation: Federation, name: str) -> tuple[str, ...]:
    """(what happened, seconds, seconds to recovery, nginx MB, server app MB, as it must)."""
    with Watch(federation) as watch:
        begin = time.monotonic()
        try:
            happened, holds = ATTACKS[name](federation, watch), "yes"
        except Exception as error:
            happened, holds = f"{type(error).__name__}: {error}", "NO"
        seconds = time.monotonic() - begin
        recovery = watch.recovered()
    numbers = (f"{seconds:.0f}", f"{recovery:.0f}", f"{watch.nginx:.0f}", f"{watch.app:.0f}")
    return (" ".join(happened.split())[:300].replace("|", "/"), *numbers, holds)


if __name__ == "__main__":
    sys.exit(main())
