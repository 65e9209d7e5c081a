"""Two sweeps on one folder: each passes over what the other runs, and looks at it again at the end."""

from support import tiny_experiment

from fedsim.run import claim as claims
from fedsim.run.claim import claim
from fedsim.run.plan import run_folder
from fedsim.sweep import waiting
from fedsim.sweep.cell_process import run_cell
from fedsim.sweep.plan import Cell
from fedsim.sweep.view import SweepView
from fedsim.sweep.waiting import Waiting


def tiny_cells(output):
    """Three cells, of which a run takes a tenth of a second."""
    experiments = [tiny_experiment(output, rounds=1, run={"seed": seed}) for seed in range(3)]
    return [Cell(experiment, run_folder(experiment)) for experiment in experiments]


def run(line, cell):
    line.hear(cell, run_cell(cell.experiment.toml(), lambda message: None))


def states(cells):
    return [cell.state for cell in cells]


def test_two_sweeps_divide_the_cells_and_both_end_when_all_are_finished(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 0.0)
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
    monkeypatch.setattr(waiting.time, "monotonic", lambda: line._next_look)
    assert line.take() is cells[0]


def test_a_cell_that_another_process_has_pruned_is_not_run(tmp_path):
    cells = tiny_cells(tmp_path)[:2]
    cells[0].doomed, cells[1].doomed = lambda: True, lambda: False
    assert Waiting(cells).take() is cells[1]
    assert states(cells) == ["pruned", "waiting"]


def test_a_run_with_other_settings_that_another_process_has_finished_is_a_failed_cell(tmp_path):
    cells = tiny_cells(tmp_path)[:1]
    line = Waiting(cells)
    run_cell(cells[0].experiment.replace(train={"momentum": 0.1}).toml(), lambda message: None)
    assert line.take() is None
    assert not line
    assert states(cells) == ["failed"]
    assert "holds a run with other settings (train.momentum)" in cells[0].reason
