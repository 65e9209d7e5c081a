"""What is said before a model of a run is used: that the run has not finished, that a folder is no file."""

import pytest
from typer.testing import CliRunner
from untrained_run import untrained_run

import fedsim
from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.export.files import export


@pytest.fixture
def run(tmp_path):
    """A run of 20 rounds that was stopped after round 17."""
    folder = untrained_run(tmp_path / "run", train={"rounds": 20}, run={"target": "rot0", "threads": 1})
    rows = "".join(f"{round},0.5\n" for round in range(18))
    (folder / "rounds.csv").write_text(f"round,mean_validation_accuracy\n{rows}")
    return folder


def test_it_is_said(run, monkeypatch):
    monkeypatch.setattr("fedsim.export.features.plot_features", lambda run, out, per_domain: [run, run])
    said = "the run has not finished: this is the best of 17 of 20 rounds"
    with pytest.warns(UserWarning, match=said):
        assert fedsim.load(run).remark == said
    assert fedsim.load(run, "last").remark == ""
    assert said in " ".join(CliRunner().invoke(app, ["features", str(run)]).output.split())


def test_a_folder_is_no_file_to_export_to(run, tmp_path):
    with pytest.raises(UserError, match=r"--output .* is a folder; name a file in it"):
        export(fedsim.load(run, "last"), "torch", tmp_path)
