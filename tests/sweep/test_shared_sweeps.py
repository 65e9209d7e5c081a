"""Two sweeps on one folder divide the cells; killed at random from either side, they end with one sweep's table."""

import random
import shlex
import subprocess
import sys

import pandas as pd
import pytest
from processes import kill_tree, until
from support import numbers

METHODS = "fedavg,fedprox,fedbn,feddg-ga,fedsam,fedadam"
DRAWS = f"sweep digits --draws 10 --trials 2 --targets rot0,rot45,rot75 --methods {METHODS}"
SLOTS = "search digits --slots terms,weights,norm --budget 6 --targets rot75"
SMALL = ("data.fraction=0.3", "train.rounds=1", "run.device=cpu", 'data.domains=["rot0", "rot30", "rot45", "rot75"]')


def start(words, output):
    """A sweep or search in a process of its own, which has one worker."""
    words = [*shlex.split(words), "--jobs", "1", *(part for word in SMALL for part in ("--set", word))]
    log = output.with_suffix(".log").open("a")
    command = [sys.executable, "-m", "fedsim", *words, "--output", str(output)]
    return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def finished(folder):
    return len(list(folder.rglob("summary.csv")))


@pytest.mark.slow
@pytest.mark.parametrize(("words", "tables", "most"), [
    (DRAWS, ["tuned.csv", "search.csv", "results.csv"], 300), (SLOTS, ["combinations.csv"], 9),
])  # fmt: skip
def test_two_processes_that_are_killed_give_the_table_of_an_unbroken_one(words, tables, most, tmp_path):
    """Each is killed with its workers after a random number of runs, at most `most`, and started again."""
    whole, shared = tmp_path / "whole", tmp_path / "shared"
    unbroken, both = start(words, whole), [start(words, shared), start(words, shared)]
    moments = sorted(random.Random(words).sample(range(1, most), 2))
    for index, moment in enumerate(moments):
        until(lambda moment=moment: finished(shared) >= moment, 7200)
        assert both[index].poll() is None
        kill_tree(both[index].pid)
        both[index] = start(words, shared)
    assert [process.wait() for process in (unbroken, *both)] == [0, 0, 0], shared.with_suffix(".log").read_text()
    for name in tables:
        ours, theirs = (numbers(folder / "digits" / name) for folder in (shared, whole))
        pd.testing.assert_frame_equal(ours, theirs, check_exact=True)
    assert not list(shared.rglob(".*lock*"))
    print(f"{finished(shared)} runs; killed after {moments}")
