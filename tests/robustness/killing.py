"""Runs that are killed by SIGKILL at a moment or at a write, and the comparison of their records after resuming."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from processes import kill_tree
from safetensors.numpy import load_file
from support import numbers

from fedsim.run.plan import run_folder
from fedsim.settings.experiment import Experiment

FILES = ("rounds.csv", "clients.csv", "details.csv", "summary.csv")

# A process that has imported everything but has not run anything. A process that it forks starts a run at once.
QUICK_RUNS = """
import contextlib, json, os, signal, sys, time
from pathlib import Path
import fedsim.client_app
from fedsim.settings.experiment import parse_experiment
from fedsim.runtime.launch import launch

def die_at_write(number):
    plain, count = Path.replace, iter(range(1, 10**6))
    def replace(path, target):
        place = next(count)
        if place == -number:
            os.kill(os.getpid(), signal.SIGKILL)
        done = plain(path, target)
        if place == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return done
    Path.replace = replace

def kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if not child:
        os.setsid()
        if order["write"]:
            die_at_write(order["write"])
        code = 1
        try:
            launch(parse_experiment(order["experiment"]))
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    started = time.monotonic()
    if order["seconds"] is not None:
        signal.signal(signal.SIGALRM, lambda number, frame: kill(child))
        signal.setitimer(signal.ITIMER_REAL, max(order["seconds"], 1e-4))
    _, status = os.waitpid(child, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(json.dumps({"code": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - started}), flush=True)
"""


class QuickRuns:
    """Does inline runs in separate processes that start quickly."""

    def __init__(self) -> None:
        words = [sys.executable, "-c", QUICK_RUNS]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, experiment: Experiment, seconds: float | None = None, write: int = 0) -> dict[str, Any]:
        """The exit code (-9 when killed) and seconds of a run until its end, until `seconds` have passed, or until the
        `write`-th file is renamed (negative: just before)."""
        order = {"experiment": experiment.toml(), "seconds": seconds, "write": write}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)


def run_by_command(experiment: Experiment, log: Path, seconds: float | None = None, rounds: bool = False) -> dict:
    """Do a run of any runtime by the command line; a kill ends every process that the run has started.

    It runs to its end, or until `seconds` have passed, with `rounds` counted from the first recorded round.
    """
    config = log.with_suffix(".toml")
    config.write_text(experiment.toml())
    code = "import sys; from fedsim.commands.cli import main; sys.argv[1:] = ['run', sys.argv[1]]; main()"
    words, file = [sys.executable, "-c", code, str(config)], run_folder(experiment) / "rounds.csv"
    with log.open("w") as said:
        process = subprocess.Popen(words, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
    started, first = time.monotonic(), None
    while process.poll() is None:
        now = time.monotonic()
        first = now if first is None and file.exists() else first
        begun = first if rounds else started
        if seconds is not None and begun is not None and now - begun >= seconds:
            kill_tree(process.pid)
        time.sleep(0.005)
    ended = time.monotonic()
    return {"code": process.returncode, "seconds": ended - started, "training": ended - (first or started)}


def differences(folder: Path, other: Path) -> list[str]:
    """The files (records without columns of times, and `last.safetensors`) in which two finished runs differ."""
    found = []
    for name in FILES:
        paths = [path for path in (folder / name, other / name) if path.exists()]
        tables = [numbers(path) for path in paths]
        if len(tables) == 1 or (tables and not (list(tables[0]) == list(tables[1]) and tables[0].equals(tables[1]))):
            found.append(name)
    one, two = (load_file(path / "last.safetensors") for path in (folder, other))
    equal = one.keys() == two.keys() and all(one[name].tobytes() == two[name].tobytes() for name in one)
    return found + ([] if equal else ["last.safetensors"])
