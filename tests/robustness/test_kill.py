"""`kill -9` at every write: the same command finishes the run, with the unbroken run's records."""

import multiprocessing
import os
import signal
from itertools import count
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from support import numbers, small_experiment

from fedsim.run.plan import run_folder
from fedsim.runtime.launch import launch


def run_and_die(experiment, write):
    """Do a run that dies when the `write`-th file is renamed (negative: just before; 0: never)."""
    plain, places = Path.replace, count(1)

    def replace(path, target):
        place = next(places)
        if place == -write:
            os.kill(os.getpid(), signal.SIGKILL)
        done = plain(path, target)
        if place == write:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    Path.replace = replace
    launch(experiment)


def run(experiment, write=0) -> int:
    """The exit code of a run in a process of its own, which has imported everything."""
    process = multiprocessing.get_context("fork").Process(target=run_and_die, args=[experiment, write])
    process.start()
    process.join()
    return process.exitcode


def differences(folder: Path, other: Path) -> list[str]:
    """The files (records without columns of times, and `last.safetensors`) in which two finished runs differ."""
    found = []
    for name in ("rounds.csv", "clients.csv", "details.csv", "summary.csv"):
        paths = [path for path in (folder / name, other / name) if path.exists()]
        tables = [numbers(path) for path in paths]
        if len(tables) == 1 or (tables and not (list(tables[0]) == list(tables[1]) and tables[0].equals(tables[1]))):
            found.append(name)
    one, two = (load_file(path / "last.safetensors") for path in (folder, other))
    equal = one.keys() == two.keys() and all(one[name].tobytes() == two[name].tobytes() for name in one)
    return found + ([] if equal else ["last.safetensors"])


@pytest.mark.slow
def test_killed_before_and_after_every_write(tmp_path):
    """An incomplete round is not taken for a complete one."""

    def of(name):
        return small_experiment(tmp_path / name, "gperxan", train={"rounds": 2}, run={"processes": 1})

    assert run(of("whole")) == 0
    for place in range(1, 1000):
        if run(of(f"before{place}"), -place) == 0:
            break
        assert run(of(f"after{place}"), place) == -signal.SIGKILL
        for cut in (of(f"before{place}"), of(f"after{place}")):
            assert run(cut) == 0
            assert differences(run_folder(cut), run_folder(of("whole"))) == []
    assert place > 20
