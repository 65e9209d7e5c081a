"""`kill -9` at random moments and at writes: the same command finishes the run, with the unbroken run's records."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import kill_tree
from safetensors.numpy import load_file
from support import numbers, small_experiment

from fedsim.run.plan import run_folder
from fedsim.settings.experiment import Experiment

FILES = ("rounds.csv", "clients.csv", "details.csv", "summary.csv")

# A process that has imported everything but has not run anything. A process that it forks starts a run at once.
QUICK_RUNS = """
import json, os, signal, sys
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
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


class QuickRuns:
    """Does inline runs in separate processes that start quickly."""

    def __init__(self) -> None:
        words = [sys.executable, "-c", QUICK_RUNS]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, experiment: Experiment, write: int = 0) -> int:
        """The exit code of a run that ends, or dies when the `write`-th file is renamed (negative: just before)."""
        order = {"experiment": experiment.toml(), "write": write}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

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


KILLED = -signal.SIGKILL
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def quick_runs() -> Iterator[QuickRuns]:
    quick_runs = QuickRuns()
    yield quick_runs
    quick_runs.close()


def check_equal(cut, whole):
    assert differences(run_folder(cut), run_folder(whole)) == []


def test_killed_before_and_after_every_write(quick_runs, tmp_path):
    """An incomplete round is not taken for a complete one."""
    whole = small_experiment(tmp_path / "whole", "gperxan", train={"rounds": 2})
    assert quick_runs.run(whole) == 0
    for place in range(1, 1000):
        before, after = (
            small_experiment(tmp_path / f"{when}{place}", "gperxan", train={"rounds": 2})
            for when in ("before", "after")
        )
        if quick_runs.run(before, write=-place) == 0:
            break
        quick_runs.run(after, write=place)
        for cut in (before, after):
            assert quick_runs.run(cut) == 0
            check_equal(cut, whole)
    assert place > 20


@pytest.mark.parametrize("name", ["fedbn", "gperxan", "feddg-ga", "csac"])
def test_ray_run_killed_at_random_moments(name, tmp_path):
    """Driver, Ray's own processes and workers are killed together, while the run starts and while it trains."""
    pytest.importorskip("ray")

    def on_ray(folder):
        return small_experiment(tmp_path / folder, name, train={"rounds": 12}, run={"runtime": "ray"})

    log = tmp_path / "log"
    whole = run_by_command(on_ray("whole"), log)
    assert whole["code"] == 0, log.read_text()
    moments = random.Random(name)
    for rounds in (False, True):
        cut = on_ray(f"cut{rounds}")
        seconds = moments.uniform(0.0, 0.8 * (whole["training"] if rounds else whole["seconds"]))
        assert run_by_command(cut, log, seconds, rounds)["code"] == KILLED
        assert run_by_command(cut, log)["code"] == 0, log.read_text()
        check_equal(cut, on_ray("whole"))
