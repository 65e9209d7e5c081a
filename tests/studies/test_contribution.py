"""`fedsim study contribution`: runs without one source, shared with the sweep; differences and their table by hand."""

import math
from pathlib import Path

import pandas as pd
import pytest
from invented import write_run
from typer.testing import CliRunner

from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.common.tasks import CLASSIFICATION, REGRESSION
from fedsim.records.reading import read_settings
from fedsim.settings.experiment import read_experiment
from fedsim.studies import Axes, Budget
from fedsim.studies.contribution import Contribution, contribution_table, run_contribution, settings_without
from fedsim.studies.plan import Cell

SMALL = ("data.fraction=0.05", 'data.domains=["rot0","rot30","rot75"]', "train.rounds=1", "run.device=cpu")


def call(verb, output, *more):
    words = [*verb, "digits", "--targets", "rot75,rot0", "--jobs", "1", "--output", str(output), *more]
    result = CliRunner().invoke(app, [*words, *(part for text in SMALL for part in ("--set", text))])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_runs_are_shared_with_the_sweep(tmp_path, in_this_process):
    """Of the sweep's cells none is repeated; those without a source are another experiment, with the other domains."""
    call(["sweep"], tmp_path)
    stamps = {file: file.stat().st_mtime_ns for file in (tmp_path / "digits").rglob("summary.csv")}
    shown = call(["study", "contribution"], tmp_path)
    assert "6 cells, 2 finished, 4 to run" in shown
    assert {file: file.stat().st_mtime_ns for file in stamps} == stamps
    folder = tmp_path / "digits-contribution"
    runs = sorted(str(file.parent.relative_to(folder)) for file in folder.rglob("summary.csv"))
    assert runs == [
        "fedavg@without=rot0/rot75/seed0",
        "fedavg@without=rot30/rot0/seed0",
        "fedavg@without=rot30/rot75/seed0",
        "fedavg@without=rot75/rot0/seed0",
    ]
    assert read_settings(folder / runs[2]).data.domains == ["rot0", "rot75"]
    table = pd.read_csv(folder / "contribution.csv")
    for row in table.itertuples():
        complete = pd.read_csv(tmp_path / f"digits/fedavg/{row.target}/seed0/summary.csv")
        lacking = pd.read_csv(folder / f"fedavg@without={row.source}/{row.target}/seed0/summary.csv")
        values = [frame["best_validation_target_accuracy"][0] for frame in (complete, lacking)]
        assert [row.complete, row.lacking, row.contribution] == pytest.approx([*values, values[0] - values[1]])
    assert "6 cells, 6 finished, 0 to run" in call(["study", "contribution"], tmp_path)


def study_of(monkeypatch, complete, without, task):
    """A study whose cells have these values of the metric, one for each seed."""
    values = {}

    def cells(source, of_seeds):
        made = []
        for seed, value in enumerate(of_seeds):
            experiment = read_experiment("digits", ["run.target=rot75", f"run.seed={seed}"])
            made.append(Cell(experiment, Path(source, str(seed)), "finished"))
            values[made[-1].folder] = value
        return made

    study = Contribution(
        cells("all", complete), {source: cells(source, of_seeds) for source, of_seeds in without.items()}
    )
    study.task = task
    monkeypatch.setattr(study, "metric_of", lambda cell: values[cell.folder])
    return study


def test_a_cell_that_was_refused_has_no_number_of_the_run_in_its_folder(tmp_path):
    folder = write_run(tmp_path, read_experiment("digits", ["run.target=rot75", SMALL[1]]))
    study = Contribution([Cell(read_settings(folder), folder, "finished")], {})
    assert not math.isnan(study.metric_of(study.cells[0]))
    study.cells[0].state = "failed"
    assert math.isnan(study.metric_of(study.cells[0]))


def test_table_by_hand(monkeypatch):
    """Mean and sample deviation over two seeds, in points; a cell without a result is left out."""
    without = {"rot0": [0.7, 0.7], "rot15": [0.8, math.nan]}
    rows = study_of(monkeypatch, [0.75, 0.85], without, CLASSIFICATION).rows()
    assert [row["contribution"] for row in rows[:3]] == pytest.approx([0.05, 0.15, -0.05])
    table = contribution_table(rows, "fedavg", CLASSIFICATION, "")
    shown = [[cell.plain for cell in row.full_cells] for row in table.rows]
    assert shown == [
        ["all sources", "80.0 ± 7.1", "80.0 ± 7.1"],
        ["rot0", "+10.0 ± 7.1", "+10.0 ± 7.1"],
        ["rot15", "-5.0", "-5.0"],
    ]


def test_less_error_is_a_contribution(monkeypatch):
    """A mean absolute error that is greater without a source says that the source helps; it has a unit of its own."""
    rows = study_of(monkeypatch, [2.0], {"rot0": [2.5]}, REGRESSION).rows()
    assert rows[0]["contribution"] == 0.5
    table = contribution_table(rows, "fedavg", REGRESSION, "")
    assert [row.full_cells[1].plain for row in table.rows] == ["2", "+0.5"]


def test_settings_without_a_source():
    """The user's own label stays, and a name with a slash is no folder."""
    base = read_experiment("digits", ["run.label=mine"])
    assert settings_without(base, ["a", "b/c", "d"], "b/c") == [
        'data.domains=["a", "d"]', 'name="digits-contribution"', 'run.label="mine,without=b_c"'
    ]  # fmt: skip


def test_one_source_is_refused():
    """Of two domains one is unseen, and without the other nobody trains."""
    with pytest.raises(UserError, match="without one source there is none left: digits has the domains rot0, rot75"):
        run_contribution(
            "digits", Axes(["fedavg"], ["all"], [0]), Budget(), overrides=['data.domains=["rot0","rot75"]']
        )
