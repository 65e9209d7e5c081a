"""Runs that are killed by SIGKILL at a moment or at a write, and the comparison of their records after resuming."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
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
        if place == abs(number) and number < 0:
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
        self._process = subprocess.Popen(
            [sys.executable, "-c", QUICK_RUNS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, experiment: Experiment, seconds: float | None = None, write: int = 0) -> dict[str, Any]:
        """Run until the end, until `seconds` have passed, or until the `write`-th file is renamed.

        A negative `write` kills just before the renaming. Returns the exit code (-9 when killed) and the seconds.
        """
        order = {"experiment": experiment.toml(), "seconds": seconds, "write": write}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait(60)


class CommandLine:
    """Does runs of any runtime by the command line; a kill ends every process that the run has started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, experiment: Experiment, seconds: float | None = None, rounds: bool = False) -> dict[str, Any]:
        """Run until its end or until `seconds` have passed, with `rounds` counted from the first recorded round."""
        config = self.folder / "experiment.toml"
        config.write_text(experiment.toml())
        code = "import sys; from fedsim.commands.cli import main; sys.argv[1:] = ['run', sys.argv[1]]; main()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(config)],
            stdout=(self.folder / "log").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        started = begun = time.monotonic()
        waiting = rounds
        first = None
        while process.poll() is None:
            now = time.monotonic()
            if first is None and (run_folder(experiment) / "rounds.csv").exists():
                first = now - started
                begun, waiting = (now, False) if waiting else (begun, waiting)
            if seconds is not None and not waiting and now - begun >= seconds:
                kill_tree(process)
            time.sleep(0.005)
        taken = time.monotonic() - started
        return {"code": process.returncode, "seconds": taken, "training": taken - (first or 0.0)}


def kill_tree(process: subprocess.Popen) -> None:
    """Send SIGKILL to a process and its descendants, until none is left."""
    while found := descendants(process.pid):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if found == [process.pid]:
            break
        time.sleep(0.01)
    process.wait()


def descendants(root: int) -> list[int]:
    """The living descendants of a process, and last the process itself."""
    parents = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[::-1]


def differences(folder: Path, other: Path) -> list[str]:
    """The files (records without columns of times, and `last.safetensors`) in which two finished runs differ."""
    found = []
    for name in FILES:
        paths = (folder / name, other / name)
        if paths[0].exists() != paths[1].exists() or (paths[0].exists() and not same_table(*map(numbers, paths))):
            found.append(name)
    models = [load_file(path / "last.safetensors") for path in (folder, other)]
    equal = models[0].keys() == models[1].keys() and all(
        models[0][name].tobytes() == models[1][name].tobytes() for name in models[0]
    )
    return found + ([] if equal else ["last.safetensors"])


def same_table(a: pd.DataFrame, b: pd.DataFrame) -> bool:
    """Same columns in the same order, same cells."""
    return list(a) == list(b) and a.equals(b)
