"""Attacks on a federation whose server, sites and attacker have a network namespace each, and what came of them.

    PYTHONPATH=tests:tests/deployment python tests/deployment/attacks.py [--only WORD,WORD]

Needs root, `ip` and nginx. Each row: what happened, when all sites were in contact again, and the most memory that
nginx and the server app took. Everything is bounded, stays in the namespaces, and ends by itself.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd
from harness import ENVIRONMENT, NGINX, SITE, VICTIM, run_folder
from machines import AVAILABLE, ip
from outcomes import CONTINUE, finished, last_line, need, options, status, statuses, trial
from processes import until
from support import read_audit
from watched import SITES, AttackedMachines, Watch

from fedsim.deploy.audit import AUDIT
from fedsim.deploy.certificates import write_server_certificate
from fedsim.deploy.contacts import CONTACTS, read_contacts
from fedsim.deploy.control import registered_nodes, reload_proxy
from fedsim.deploy.renewal import renew

FRESH_SECONDS = 25.0
Attack = Callable[[AttackedMachines, Watch], str]


def from_outside(federation: AttackedMachines, watch: Watch, words: tuple, wrong=lambda said, watch: False) -> str:
    """What a machine without a key sends does not silence any site."""
    said = federation.outsider(*words)
    need(watch.oldest < FRESH_SECONDS and not wrong(said, watch), f"{said}; silent for {watch.oldest:.0f} s")
    return f"{said}; longest silence of a site {watch.oldest:.0f} s"


def stolen_key(federation: AttackedMachines, watch: Watch) -> str:
    node, key = registered_nodes(federation.federation)[SITE], federation.federation.kit(SITE) / "key"
    said = federation.outsider("steal", key, node, 30)
    lines = [line for line in read_audit(federation.server_kit / AUDIT) if line["event"] == "double"]
    need(lines and lines[-1]["site"] == SITE, f"nothing was said; {said}")
    return f"said in audit log, check and status: {lines[-1]['reason']}"


def long_heartbeat(federation: AttackedMachines, watch: Watch) -> str:
    """The site's SuperNode dies, and a heartbeat with its key asks to count as online for half an hour."""
    node, key = registered_nodes(federation.federation)[SITE], federation.federation.kit(SITE) / "key"
    begin, contacts = time.time(), federation.server_kit / CONTACTS
    federation.kill(SITE)
    said = federation.outsider("linger", key, node, 1800)
    until(lambda: read_contacts(contacts)[SITE].since > begin, 150, "admission of the site's own SuperNode")
    return f"answer {said['answer']}; the site's own SuperNode is admitted after {time.time() - begin:.0f} s"


def forgeries(federation: AttackedMachines, watch: Watch) -> str:
    nodes, key = registered_nodes(federation.federation), federation.federation.kit(SITE) / "key"
    said = federation.outsider("forge", key, nodes[SITE], nodes[SITES[0]])
    answers = (said["another's reply"][0], said["signature"], said["signature again"])
    need(answers == (400, 200, 503), f"{said}")
    detail = json.loads(said["another's reply"][1])["detail"]
    return f"refused: {detail}; second use of a signature: 503"


def wrong_clock(federation: AttackedMachines, watch: Watch) -> str:
    code, said = federation.outsider("clock", federation.federation.kit(SITE) / "key", 12)["answer"]
    need(code == 400 and re.search("1[0-2] s ahead", said), f"{code} {said}")
    return json.loads(said)["detail"]


def bad_reply(federation: AttackedMachines, watch: Watch, kind: str, reason: str, **fault: object) -> str:
    """The reply of a registered site in round 2 is an attack; the round continues with the other sites."""
    federation.break_site(kind, **fault)
    process, folder = federation.attempt(f"bad-{kind}", **CONTINUE)
    finished(process)
    need(reason in status(folder) and statuses(folder)[3].eq("ok").all(), status(folder))
    rounds = len(pd.read_csv(folder / "rounds.csv")) - 1
    return f"exit 0; refused: {status(folder)[:120]}; server app {watch.app:.0f} MB; {rounds} rounds"


def flood(federation: AttackedMachines, watch: Watch) -> str:
    """The server app refuses a reply of 4 GB by name, the gate stops the rest of it, and the round continues."""
    federation.fault_file().with_suffix(".flood").write_text("4096")
    process, folder = federation.attempt("flood", **CONTINUE)
    finished(process)
    said = statuses(folder)
    ((_, client), reason), *more = said[(said != "ok") & (said.index.get_level_values("round") > 0)].items()
    need(client == VICTIM and "larger than" in reason and not more, f"{client}: {reason} {more}")
    until(lambda: "flood: " in federation.log(SITE), 200)
    stopped = next(line for line in federation.log(SITE).splitlines() if line.startswith("flood: "))
    need("refused after" in stopped and watch.app - watch.base < 500, f"{stopped}; {watch.base} to {watch.app} MB")
    return f"exit 0; {stopped}; server app {watch.base:.0f} to {watch.app:.0f} MB, SuperLink {watch.link:.0f} MB"


def absurd_count(federation: AttackedMachines, watch: Watch) -> str:
    federation.break_site("examples", round=0, phase="handshake")
    said = finished(federation.attempt("examples")[0], 2)
    need("1000000000 examples" in said, said[-300:])
    return f"exit 2: {last_line(said)[:150]}"


def path_as_token(federation: AttackedMachines, watch: Watch) -> str:
    """The server sends a path in the place of the run's token, which names a folder of the site's state."""
    folder = run_folder(federation.folder / "path-as-token")
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "checkpoint" / "token").write_text("../../../stolen")
    said = finished(federation.attempt("path-as-token")[0], 2)
    need("refuses the server's message: token" in said, said[-300:])
    need(not list(federation.folder.rglob("stolen")), "a site has made the folder")
    return f"exit 2: {last_line(said)[:150]}"


def impostor(federation: AttackedMachines, watch: Watch) -> str:
    """A registered site that claims another's domain is refused; with `continue` the run goes on with honest sites."""
    with federation.posing_as("rot0"):
        words = {**CONTINUE, "run.wait_for_sites": 40, "train.rounds": 2}
        process, folder = federation.attempt("impostor", **words)
        finished(process)
    need("site 'site-rot30' claims to be 'rot0'" in (folder / "run.log").read_text(), "the log does not name it")
    return "exit 0 without it; log: site 'site-rot30' claims to be 'rot0', but its key is that of 'rot30'"


SUBMIT = """import sys, time
from fedsim.deploy.control import Control
from fedsim.deploy.federation import CONNECTION, read_federation
control = Control(read_federation(sys.argv[1]))
run = str(control.flwr('run', sys.argv[2], CONNECTION)['run-id'])
until, row = time.monotonic() + 150, {}
while time.monotonic() < until and not str(row.get('status')).startswith('finished'):
    time.sleep(2)
    row = control.flwr('list', CONNECTION, '--run-id', run)['runs'][0]
print(row)
"""
FOREIGN = """from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
server = ServerApp()
client = ClientApp()
@client.query()
def read(message, context):
    return Message(RecordDict({'key': ConfigRecord({'key': open('key').read()})}), reply_to=message)
@server.main()
def main(grid, context):
    messages = [Message(RecordDict(), node, 'query') for node in grid.get_node_ids()]
    replies = grid.send_and_receive(messages, timeout=60)
    raise RuntimeError('stolen: %d of %d' % (sum(r.has_content() for r in replies), len(messages)))
"""
PROJECT = """[project]
name = "foreign"
version = "0.1.0"
description = "x"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "x"
[tool.flwr.app.components]
serverapp = "foreign:server"
clientapp = "foreign:client"
[tool.flwr.app.config]
"""


def foreign_app(federation: AttackedMachines, watch: Watch) -> str:
    app = federation.folder / "foreign"
    (app / "foreign").mkdir(parents=True)
    (app / "foreign" / "__init__.py").write_text(FOREIGN)
    (app / "pyproject.toml").write_text(PROJECT)
    words = [*federation.inside("server"), sys.executable, "-c", SUBMIT, federation.file, app]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, env=ENVIRONMENT)
    need("stolen: 0 of 3" in done.stdout, (done.stdout + done.stderr)[-400:])
    return "no site ran it (pinned bundles): replies with keys: 0 of 3"


def busy_database(federation: AttackedMachines, watch: Watch) -> str:
    """The SuperLink's answers are errors."""
    code = (
        "import sqlite3, sys, time\nconnection = sqlite3.connect(sys.argv[1], timeout=30)\n"
        "connection.execute('BEGIN EXCLUSIVE')\ntime.sleep(90)"
    )
    database = federation.server_kit / "state" / "superlink.db"
    subprocess.run([sys.executable, "-c", code, database], timeout=150, check=True)
    return f"sites try again; all in contact {back(federation, watch):.0f} s after the end"


def back(federation: AttackedMachines, watch: Watch, most: float = 200.0) -> float:
    """Seconds until all sites are in contact."""
    seconds = watch.recovered(most)
    need(seconds == seconds, f"{federation.ages()}")
    return seconds


def expired_certificate(federation: AttackedMachines, watch: Watch) -> str:
    """The server's certificate expires; `fedsim deploy renew` replaces it, and no process is restarted."""
    kit, described = federation.server_kit, federation.federation
    for name in ("server.key", "server.pem"):
        (kit / name).unlink()
    ca = (described.kit("operator") / "ca.key", kit / "ca.crt")
    write_server_certificate("demo", described.server_names, -0.02, ca, (kit / "server.key", kit / "server.pem"))
    reload_proxy(described)
    federation.stop(SITE)
    said = federation.start(SITE, expect=None).stdout
    renew(described)
    need("has expired" in said, said)
    after = back(federation, watch)
    return f"a site that starts says: {said.strip()[-110:]}; after renew all in contact within {after:.0f} s"


def cut(federation: AttackedMachines) -> None:
    words = ("-n", federation.namespace("server"), "link", "set", federation.link(SITE))
    ip(*words, "down")
    time.sleep(45)
    ip(*words, "up")


def in_round_two(federation: AttackedMachines, watch: Watch, strike: Callable, code: int = 0) -> str:
    """In round 2 the victim trains for 15 s; no reply is lost, or none by the same command."""
    slow = federation.break_site("slow", seconds=15)
    name = f"struck{len(list(federation.folder.glob('struck*')))}"
    process, folder = federation.attempt(name)
    until(lambda: not slow.exists(), 300, "round 2")
    strike(federation)
    finished(process, code)
    if code:
        finished(federation.attempt(name)[0])
    need(set(statuses(folder)) == {"ok"}, "replies were lost")
    return f"exit {code}; {'start.sh and the same command: exit 0, ' if code else ''}no reply lost"


def kill_server(federation: AttackedMachines) -> None:
    federation.kill("server")
    federation.start("server")


def hanging_supernode(federation: AttackedMachines, watch: Watch) -> str:
    pid = federation.pid(SITE)
    os.kill(pid, signal.SIGSTOP)
    seconds = back(federation, watch, 420)
    need(federation.pid(SITE) != pid, "it is the same process")
    return f"ended and started again by its supervisor, connected after {seconds:.0f} s"


ATTACKS: dict[str, Attack] = {
    "1,000 slow connections from one machine, 60 s": partial(from_outside, words=("slow", 1000, 60)),
    "40 bodies of 15 MB without a key": partial(
        from_outside, words=("bodies", 40, 15), wrong=lambda _, watch: watch.nginx >= 200
    ),
    "1,500 requests without a key": partial(from_outside, words=("flood", 1500), wrong=lambda said, _: "200" in said),
    "stolen key next to the original": stolen_key,
    "heartbeat for half an hour with a stolen key": long_heartbeat,
    "reply in another's name, replayed signature": forgeries,
    "clock 12 s ahead": wrong_clock,
    "3e38 in every weight": partial(bad_reply, kind="values", reason="times the median"),
    "negative variances": partial(bad_reply, kind="variance", reason="negative value"),
    "reply of 500 MB": partial(bad_reply, kind="huge", reason="larger than", megabytes=500),
    "reply of 4 GB": flood,
    "10^9 examples": absurd_count,
    "server sends a path as the run's token": path_as_token,
    "site poses as another": impostor,
    "operator's app reads keys": foreign_app,
    "database locked for 90 s": busy_database,
    "server certificate expired": expired_certificate,
    "link cut for 45 s in round 2 (stop)": partial(in_round_two, strike=cut),
    "SuperNode kill -9 in round 2 (stop)": partial(in_round_two, strike=lambda federation: federation.kill(SITE)),
    "nginx restarted in round 2 (stop)": partial(in_round_two, strike=AttackedMachines.end_nginx),
    "SuperLink kill -9 in round 2": partial(in_round_two, strike=kill_server, code=1),
    "SuperNode hangs": hanging_supernode,
}


def one(federation: AttackedMachines, name: str) -> str:
    """What happened, seconds until all sites were in contact again, and the most memory."""
    with Watch(federation) as watch:
        try:
            happened = ATTACKS[name](federation, watch)
        finally:
            federation.end_runs()
        back = watch.recovered()
    return f"{happened}; back after {back:.0f} s; nginx {watch.nginx:.0f} MB, server app {watch.app:.0f} MB"


def main() -> int:
    """Attack, and print the table."""
    words = options(__doc__, only="")
    names = [name for name in ATTACKS if any(word in name for word in words.only.split(","))]
    need(AVAILABLE and NGINX, "needs root, ip (iproute2) and nginx")
    with tempfile.TemporaryDirectory(prefix="attacks-") as folder, AttackedMachines(Path(folder)) as federation:
        failed = [name for name in names if not trial(name, partial(one, federation, name))]
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
