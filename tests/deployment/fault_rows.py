"""Faults of links, databases, processes and certificates."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
from harness import is_alive, until
from lanes import VICTIM, need
from proxied import SITES, Federation, Watch, wait
from test_namespaces import ip

from fedsim.deploy.certificates import write_server_certificate
from fedsim.deploy.control import reload_proxy
from fedsim.deploy.renewal import renew


def in_round_two(federation: Federation, name: str) -> tuple[subprocess.Popen, Path]:
    """Start a run and wait until round 2, in which the victim trains for 15 s."""
    federation.break_site("slow", seconds=15)
    process, folder = federation.begin(name)
    wait(lambda: not federation.fault_file(f"site-{VICTIM}").exists(), 300)
    return process, folder


def unbroken(process: subprocess.Popen, folder: Path) -> str:
    """Wait until the run has completed, and check that no reply was lost."""
    _, said = process.communicate(timeout=900)
    need(process.returncode == 0, said[-400:])
    need(set(pd.read_csv(folder / "clients.csv")["status"]) == {"ok"}, "replies were lost")
    return "exit 0, no reply lost"


def cut(federation: Federation, watch: Watch) -> str:
    """The victim's link is cut for 45 s in round 2; run.on_client_failure is "stop"."""
    process, folder = in_round_two(federation, "cut")
    words = ("-n", federation.namespace("server"), "link", "set", f"v{2 + SITES.index(f'site-{VICTIM}')}")
    ip(*words, "down")
    time.sleep(45)
    ip(*words, "up")
    return unbroken(process, folder)


def killed_site(federation: Federation, watch: Watch) -> str:
    """kill -9 of the victim's SuperNode in round 2; run.on_client_failure is "stop"."""
    process, folder = in_round_two(federation, "killed-site")
    federation.kill(f"site-{VICTIM}")
    return unbroken(process, folder)


def restarted_proxy(federation: Federation, watch: Watch) -> str:
    """nginx ends in round 2 and is started again."""
    process, folder = in_round_two(federation, "proxy")
    pid = int((federation.server_kit / "run" / "nginx-master.pid").read_text())
    os.kill(pid, signal.SIGTERM)
    until(lambda: not is_alive(pid), 60, "end of nginx")
    federation.start("server")
    return unbroken(process, folder)


def killed_server(federation: Federation, watch: Watch) -> str:
    """kill -9 of SuperLink and server app in round 2; then start.sh and the same command are called."""
    process, _ = in_round_two(federation, "killed-server")
    federation.kill("server")
    federation.start("server")
    process.communicate(timeout=900)
    need(process.returncode == 1, f"exit {process.returncode}")
    return f"exit 1; start.sh and the same command: {unbroken(*federation.begin('killed-server'))}"


def busy_database(federation: Federation, watch: Watch) -> str:
    """The SuperLink's database is locked for 90 s, so that its answers are errors."""
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
    """SIGSTOP of a SuperNode, which is then alive but does nothing."""
    pid = federation.pid(SITES[1])
    os.kill(pid, signal.SIGSTOP)
    seconds = watch.recovered(420)
    need(seconds == seconds and federation.pid(SITES[1]) != pid, f"{federation.ages()}")
    return f"ended and started again by its supervisor, connected after {seconds:.0f} s"


def expired_certificate(federation: Federation, watch: Watch) -> str:
    """The server's certificate expires; `fedsim deploy renew` replaces it, and no process is restarted."""
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
