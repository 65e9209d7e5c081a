"""Data that are not there are named before any cell of a sweep, or a run, starts."""

import pytest
from typer.testing import CliRunner

from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.settings.experiment import read_experiment
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


def test_a_run_looks_for_its_data_before_the_network_is_built(tmp_path, monkeypatch):
    """The first weights may be a download, in vain where there is no data set."""
    monkeypatch.setattr("fedsim.run.plan.build_net", lambda *_: pytest.fail("a network was built"))
    words = ["run", "pacs", "--method", "fedavg", "--target", "sketch", "--set", f"data.root={tmp_path / 'nowhere'}"]
    result = CliRunner().invoke(app, [*words, "--output", str(tmp_path / "out")])
    assert isinstance(result.exception, UserError)
    assert str(result.exception).startswith(f"PACS: no folder {tmp_path / 'nowhere'}; set data.root")
    assert not (tmp_path / "out").exists()


def test_only_cells_without_data_fail_where_others_have_theirs(tmp_path):
    """A sweep over several data sets, as a paper's table has, runs those that are there."""
    there = Cell(read_experiment("digits"), tmp_path / "there")
    missing = Cell(read_experiment("pacs", [f"data.root={tmp_path / 'nowhere'}"]), tmp_path / "missing")
    look_for_data([there, missing])
    assert (there.state, missing.state) == ("waiting", "failed")
    assert "no folder" in missing.reason


@pytest.mark.parametrize(("config", "target"), [("pacs", "photo"), ("tables/csac-table-3", "M0")])
def test_a_dry_run_says_that_data_are_missing_and_goes_on(config, target, tmp_path):
    """A user may plan on a machine that has no data, but must not be told that all is ready."""
    words = ["sweep", config, "--dry-run", "--set", f"data.root={tmp_path / 'nowhere'}", "--targets", target]
    result = CliRunner().invoke(app, [*words, "--output", str(tmp_path / "out")])
    assert result.exit_code == 0
    (line,) = [line for line in result.output.splitlines() if line.startswith("The data are not on this machine: ")]
    assert str(tmp_path / "nowhere") in line
    assert " hours one cell at a time" in result.output or "waiting" in result.output
    digits = CliRunner().invoke(app, ["sweep", "digits", "--dry-run", "--output", str(tmp_path / "out")])
    assert "not on this machine" not in digits.output
