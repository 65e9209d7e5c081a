"""Data that are not there are named before any cell of a sweep, or a run, starts."""

import pytest
from typer.testing import CliRunner

from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.settings.experiment import read_experiment
from fedsim.sweep.plan import Cell, look_for_data

STARTS = {
    "fedsim.sweep.pool.give": ["sweep", "pacs", "--targets", "photo"],  # the start of a process for a cell
    "fedsim.sweep.pool.start": ["sweep", "tables/csac-table-3", "--targets", "M0"],
    "fedsim.run.plan.build_net": ["run", "pacs", "--method", "fedavg", "--target", "sketch"],  # perhaps a download
}


@pytest.mark.parametrize("start", STARTS)
def test_missing_data_are_refused_before_anything_starts(start, tmp_path, monkeypatch):
    """A dry run says it and goes on: a user may plan without data, but must not be told that all is ready."""
    monkeypatch.setattr(start, lambda *_: pytest.fail("it was started"))
    missing, out = str(tmp_path / "nowhere"), tmp_path / "out"
    settings = ["--set", f"data.root={missing}", "--set", "model.backbone=digits-cnn", "--output", str(out)]
    words = [*STARTS[start], *settings]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, UserError)
    assert missing in str(result.exception)
    assert (result.output.strip(), "\n" in str(result.exception), out.exists()) == ("", False, False)
    if words[0] == "run":
        assert str(result.exception).startswith(f"PACS: no folder {missing}; set data.root")
        return
    dry = CliRunner().invoke(app, [*words, "--dry-run"])
    assert dry.exit_code == 0
    (line,) = [line for line in dry.output.splitlines() if line.startswith("The data are not on this machine: ")]
    assert missing in line
    assert " hours one cell at a time" in dry.output or "waiting" in dry.output


def test_only_cells_without_data_fail_where_others_have_theirs(tmp_path):
    """A sweep over several data sets, as a paper's table has, runs those that are there."""
    there = Cell(read_experiment("digits"), tmp_path / "there")
    missing = Cell(read_experiment("pacs", [f"data.root={tmp_path / 'nowhere'}"]), tmp_path / "missing")
    look_for_data([there, missing])
    assert (there.state, missing.state) == ("waiting", "failed")
    assert "no folder" in missing.reason
