"""Two sweeps on one folder divide the cells; killed at random from either side, they end with one sweep's table."""

import os
import random
import shlex
import subprocess
import sys
from contextlib import ExitStack

import pandas as pd
import pytest
from processes import kill_tree, until
from support import numbers, tiny_experiment

from fedsim.runs import claim as claims
from fedsim.runs.claim import claim
from fedsim.runs.plan import run_folder
from fedsim.studies import pool
from fedsim.studies.cell_process import run_cell
from fedsim.studies.plan import Cell
from fedsim.studies.pool import Waiting
from fedsim.studies.view import SweepView

METHODS = "fedavg,fedprox,fedbn,feddg-ga,fedsam,fedadam"
DRAWS = f"sweep digits --draws 10 --trials 2 --targets rot0,rot45,rot75 --methods {METHODS}"
SLOTS = "search digits --slots terms,weights,norm --budget 6 --targets rot75"
SMALL = ("data.fraction=0.3", "train.rounds=1", "run.device=cpu", 'data.domains=["rot0", "rot30", "rot45", "rot75"]')


@pytest.fixture
def start():
    """Starts a sweep or search in a process of its own, which has one worker; at the end none is left."""
    with ExitStack() as stack:

        def started(words, output):
            words = [*shlex.split(words), "--jobs", "1", *(part for word in SMALL for part in ("--set", word))]
            log = stack.enter_context(output.with_suffix(".log").open("a"))
            command = [sys.executable, "-m", "fedsim", *words, "--output", str(output)]
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            stack.callback(kill_tree, process.pid)
            return process

        yield started


def finished(folder):
    return sum("summary.csv" in files for *_, files in os.walk(folder))  # folders of running cells come and go


@pytest.mark.slow
@pytest.mark.parametrize(("words", "tables", "most"), [
    (DRAWS, ["tuned.csv", "search.csv", "results.csv"], 300), (SLOTS, ["combinations.csv"], 9),
])  # fmt: skip
def test_two_processes_that_are_killed_give_the_table_of_an_unbroken_one(words, tables, most, tmp_path, start):
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


def tiny_cells(output):
    experiments = [tiny_experiment(output, rounds=1, run={"seed": seed}) for seed in range(3)]
    return [Cell(experiment, run_folder(experiment)) for experiment in experiments]


def run(line, cell):
    line.note(cell, run_cell(cell.experiment.toml(), lambda message: None))


def states(cells):
    return [cell.state for cell in cells]


def test_two_sweeps_divide_the_cells_and_both_end_when_all_are_finished(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pool, "LOOK_SECONDS", 0.0)
    ours, theirs = tiny_cells(tmp_path), tiny_cells(tmp_path)
    one, other = Waiting(ours), Waiting(theirs)
    first = one.take()
    view = SweepView(theirs, 1)
    with claim(first.folder):
        assert [other.take(), other.take()] == theirs[1:]
        assert states(theirs) == ["elsewhere", "waiting", "waiting"]
        for cell in theirs[1:]:
            run(other, cell)
        assert other.take() is None
        assert other
        view.update()
        view.update()
        assert capsys.readouterr().err.count("waiting for other processes, which run the last cells: 1") == 1
    run(one, first)
    for line in (one, other):
        assert line.take() is None
        assert not line
    assert states(ours) == states(theirs) == ["finished"] * 3


def test_a_cell_that_another_process_claims_first_or_leaves_comes_back(tmp_path, monkeypatch):
    """Between the look and the claim of the worker another one may have claimed it."""
    monkeypatch.setattr(claims, "PATIENCE_SECONDS", 0.0)
    cells = tiny_cells(tmp_path)[:1]
    line = Waiting(cells)
    assert line.take() is cells[0]
    with claim(cells[0].folder):
        run(line, cells[0])
        assert states(cells) == ["elsewhere"]
        assert line.take() is None  # and the next look is a second away
        assert line.take() is None
    monkeypatch.setattr(pool.time, "monotonic", lambda: line._next_look)
    assert line.take() is cells[0]


def test_a_cell_that_another_process_has_pruned_or_run_with_other_settings_is_not_run(tmp_path):
    cells = tiny_cells(tmp_path)[:2]
    cells[0].should_prune, cells[1].should_prune = lambda: True, lambda: False
    assert Waiting(cells).take() is cells[1]
    assert states(cells) == ["pruned", "waiting"]
    cells = tiny_cells(tmp_path)[:1]  # another process has finished a run with other settings
    line = Waiting(cells)
    run_cell(cells[0].experiment.replace(train={"momentum": 0.1}).toml(), lambda message: None)
    assert line.take() is None
    assert not line
    assert states(cells) == ["failed"]
    assert "holds a run with other settings (train.momentum)" in cells[0].reason


def test_a_finished_cell_names_the_selected_result_and_the_last_one(tmp_path):
    cell = tiny_cells(tmp_path)[0]
    cell.state = "finished"
    cell.folder.mkdir(parents=True)
    summary = cell.folder / "summary.csv"
    summary.write_text("best_validation_target_accuracy,last_target_accuracy\n0.571,0.603\n")
    text = SweepView([cell], 1)._end_of(cell)
    assert text == f"finished: {cell.title} 57.1 % at the selected round, 60.3 % at the last round"
    assert SweepView([cell], 1, blind=True)._end_of(cell) == f"finished: {cell.title}"
    summary.write_text("best_validation_target_accuracy,last_target_accuracy\n,0.603\n")
    assert SweepView([cell], 1)._end_of(cell).endswith(f"{cell.title} 60.3 % at the last round")
