"""Seconds per round of a deployed run, compared with those of an empty Flower app on the same federation.

    python benchmarks/deployed.py [--rounds 4] [--set key=value ...]

It starts a federation of three source sites and a target site on loopback, with kits, TLS and keys. Then it runs two
apps. The server of the empty app sends every site an empty message twice a round, and its clients answer at once: this
measures what Flower itself costs (polling, processes, imports). The other app is `fedsim run digits`. The printed
numbers are medians over all rounds but the first. Processor seconds are those of all processes of the federation
together, from round 1 to the last round; on a busy machine they are the better measure.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pandas as pd
import tomli_w

from fedsim.deploy.control import Control
from fedsim.deploy.federation import CONNECTION, Federation, read_federation
from fedsim.deploy.kits import init

DOMAINS = {"rot0": "source", "rot15": "source", "rot30": "source", "rot45": "target"}
PROGRAMS = (
    "flwr-serverapp",
    "deploy superlink",
    "deploy supernode",
    "deploy client",
    "flower-superexec",
    "flwr-clientapp",
)
EMPTY_APP = {
    "project": {"name": "empty", "version": "0.1.0", "description": "The floor", "license": "Apache-2.0"},
    "tool": {
        "flwr": {
            "app": {
                "publisher": "fedsim",
                "components": {"serverapp": "emptyapp.both:server", "clientapp": "emptyapp.both:client"},
                "config": {"rounds": 0, "report": ""},
            }
        }
    },
}
EMPTY_CODE = """
import json, pathlib, time
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()

@client.query("empty")
def answer(message, context):
    return Message(RecordDict(), reply_to=message)

@server.main()
def main(grid, context):
    seconds = []
    while len(list(grid.get_node_ids())) < 4:
        time.sleep(0.5)
    for _ in range(int(context.run_config["rounds"])):
        started = time.perf_counter()
        for _ in ("train", "evaluate"):
            nodes = list(grid.get_node_ids())
            list(grid.send_and_receive([Message(RecordDict(), node, "query.empty") for node in nodes]))
        seconds.append(time.perf_counter() - started)
    pathlib.Path(context.run_config["report"]).write_text(json.dumps(seconds))
"""


@contextmanager
def loopback(folder: Path):
    """A running federation of DOMAINS on this machine."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(len(DOMAINS) + 1)]
        server, *ports = [probe.getsockname()[1] for probe in probes]
    sites = [
        {"name": name, "domain": name, "role": role, "port": port} for (name, role), port in zip(DOMAINS.items(), ports)
    ]
    file = folder / "federation.toml"
    file.write_text(tomli_w.dumps({"address": "127.0.0.1", "port": server, "proxy": "none", "sites": sites}))
    federation = read_federation(file)
    init(federation)
    try:
        for name in ("server", *DOMAINS):
            script(federation, name, "start.sh")
        yield federation, file
    finally:
        for name in (*DOMAINS, "server"):
            script(federation, name, "stop.sh")


def script(federation: Federation, name: str, which: str) -> None:
    """Run a kit's script with the programs of this Python environment."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    kit = federation.kit(name)
    with (kit / "script.log").open("w") as log:
        subprocess.run([kit / which], cwd=kit, env={**os.environ, "PATH": path}, stdout=log, stderr=log, check=False)


def empty_rounds(federation: Federation, folder: Path, rounds: int) -> list[float]:
    """Seconds of each round of the empty app."""
    app = folder / "empty"
    (app / "emptyapp").mkdir(parents=True)
    (app / "pyproject.toml").write_text(tomli_w.dumps(EMPTY_APP))
    (app / "emptyapp" / "__init__.py").write_text("")
    (app / "emptyapp" / "both.py").write_text(EMPTY_CODE)
    report, settings = folder / "report.json", folder / "settings.toml"
    settings.write_text(tomli_w.dumps({"rounds": rounds, "report": str(report)}))
    answer = Control(federation).flwr("run", str(app), CONNECTION, "--run-config", str(settings))
    if not answer.get("success"):
        raise RuntimeError(f"the empty app was refused: {answer}")
    deadline = time.monotonic() + 60 * (1 + rounds)
    while not report.is_file():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the empty app wrote no {report}; see the SuperLink's log")
        time.sleep(0.5)
    return json.loads(report.read_text())


def processor_seconds(folder: Path) -> dict[str, float]:
    """{program: processor seconds} of the processes that work below a folder, with their ended children."""
    used: dict[str, float] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if not (process / "cwd").readlink().is_relative_to(folder):
                continue
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            times = (process / "stat").read_text().rsplit(")", 1)[1].split()[11:15]
        except OSError:  # another user's process, or one that has ended in the meantime
            continue
        name = next((name for name in PROGRAMS if name in " ".join(words[:5])), "others")
        used[name] = used.get(name, 0.0) + sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
    return used


class Meter(threading.Thread):
    """Notes the processor seconds of the federation when a round is recorded."""

    def __init__(self, folder: Path, table: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.table = folder, table
        self.seen: dict[int, dict[str, float]] = {}

    def run(self) -> None:
        """Check five times a second."""
        while True:
            rows = self.table.read_text().count("\n") - 1 if self.table.is_file() else 0
            if rows not in self.seen:
                self.seen[rows] = processor_seconds(self.folder)
            time.sleep(0.2)

    def a_round(self) -> dict[str, float]:
        """Processor seconds per round by program, from round 1 to the last but one, because the last ends the run."""
        first, last = min(rows for rows in self.seen if rows > 1), max(self.seen) - 1  # rows: round 0 is one
        before, after = self.seen[first], self.seen[last]
        return {name: (after[name] - before.get(name, 0.0)) / (last - first) for name in after}


def fedsim_rounds(file: Path, folder: Path, rounds: int, words: list[str]) -> list[float]:
    """Seconds of each round of `fedsim run digits`."""
    settings = ["run.target=rot45", f"data.domains={json.dumps(list(DOMAINS))}", f"train.rounds={rounds}", *words]
    options = [part for word in settings for part in ("--set", word)]
    command = [sys.executable, "-m", "fedsim", "run", "digits", "--federation", str(file)]
    rows = folder / "out" / "digits" / "fedavg" / "rot45" / "seed0" / "rounds.csv"
    meter = Meter(folder, rows)
    meter.start()
    subprocess.run([*command, "--output", str(folder / "out"), *options], check=True, cwd="/")
    used = meter.a_round()
    print(f"processor seconds a round: {sum(used.values()):.2f} =", {k: round(v, 2) for k, v in used.items()})
    table = pd.read_csv(rows)
    return table.loc[table["round"] >= 1, "round_seconds"].tolist()


def main() -> None:
    """Measure both and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--no-floor", action="store_true", help="without the empty app")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="deployed-") as name, loopback(Path(name)) as (federation, file):
        floor = [] if words.no_floor else empty_rounds(federation, Path(name), words.rounds)
        ours = fedsim_rounds(file, Path(name), words.rounds, words.set)
    lines = (("empty app, two messages a round", floor), ("fedsim run digits", ours))
    for title, seconds in [line for line in lines if line[1]]:
        print(f"{title:34}{statistics.median(seconds[1:]):7.1f} s a round   {[round(each, 1) for each in seconds]}")


if __name__ == "__main__":
    main()
