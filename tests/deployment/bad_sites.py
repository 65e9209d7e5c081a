"""Registered sites that attack, and an operator who submits another app."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from harness import ENVIRONMENT
from lanes import VICTIM, need
from proxied import Federation, Watch, wait

SUBMIT = Path(__file__).with_name("submit.py")


def bad_reply(kind: str, reason: str, **fault: object) -> Callable[[Federation, Watch], str]:
    """The reply of a registered site in round 2 is an attack; the round continues with the other sites."""

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
    """A site reports 10^9 examples in the handshake."""
    federation.break_site("examples", round_=0, phase="handshake")
    process, _ = federation.begin("examples")
    _, said = process.communicate(timeout=400)
    need(process.returncode == 2 and "1000000000 examples" in said, f"{process.returncode} {said[-300:]}")
    return f"exit 2: {said.strip().splitlines()[-1][:150]}"


def impostor(federation: Federation, watch: Watch) -> str:
    """A registered site that claims another's domain is refused; with `continue` the run goes on with honest sites."""
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


def flood(federation: Federation, watch: Watch) -> str:
    """The server app refuses a reply of 4 GB by name, the gate stops the rest of it, and the round continues."""
    site = f"site-{VICTIM}"
    federation.fault_file(site).with_suffix(".flood").write_text("4096")
    process, folder = federation.begin("flood", **{"run.on_client_failure": "continue"})
    _, said = process.communicate(timeout=900)
    need(process.returncode == 0, said[-300:])
    clients = pd.read_csv(folder / "clients.csv")
    (refused,) = clients.loc[(clients["round"] > 0) & (clients["status"] != "ok"), ["client", "status"]].to_numpy()
    need(refused[0] == VICTIM and "larger than" in refused[1], str(refused))
    wait(lambda: "flood: " in federation.log(site), 200)
    stopped = next(line for line in federation.log(site).splitlines() if line.startswith("flood: "))
    need("refused after" in stopped and watch.app - watch.base < 500, f"{stopped}; {watch.base} to {watch.app} MB")
    return f"exit 0; {stopped}; server app {watch.base:.0f} to {watch.app:.0f} MB, SuperLink {watch.link:.0f} MB"


def foreign_app(federation: Federation, watch: Watch) -> str:
    """The operator submits another app, which reads the sites' keys."""
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
