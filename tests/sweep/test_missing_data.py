"""Data that are not there are named before any cell of a sweep starts."""

import pytest
from typer.testing import CliRunner

from fedsim.cli import app
from fedsim.errors import UserError
from fedsim.experiment import read_experiment
from fedsim.sweep.plan import Cell, look_for_data


@pytest.mark.parametrize(("config", "target"), [("pacs", "photo"), ("tables/csac-table-3", "M0")])
def test_a_missing_data_set_is_refused_before_any_cell_starts(config, target, tmp_path, monkeypatch):
    """It is a UserError (one line, exit code 2), and no process is started that would fail for every cell."""
    monkeypatch.setattr("fedsim.sweep.pool.give", lambda worker, cell: pytest.fail("a cell was started"))
    words = ["sweep", config, "--set", f"data.root={tmp_path / 'nowhere'}", "--targets", target]
    result = CliRunner().invoke(app, [*words, "--output", str(tmp_path / "out")])
    assert isinstance(result.exception, UserError)
    assert str(tmp_path / "nowhere") in str(result.exception)
    assert (result.output, "\n" in str(result.exception)) == ("", False)
    assert not (tmp_path / "out").exists()


def test_only_cells_without_data_fail_where_others_have_theirs(tmp_path):
    """A sweep over several data sets, as a paper's table has, runs those that are there."""
    there = Cell(read_experiment("digits"), tmp_path / "there")
    missing = Cell(read_experiment("pacs", [f"data.root={tmp_path / 'nowhere'}"]), tmp_path / "missing")
    look_for_data([there, missing])
    assert (there.state, missing.state) == ("waiting", "failed")
    assert "no folder" in missing.reason
