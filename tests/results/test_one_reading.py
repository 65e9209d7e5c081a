"""`compare`, `plot` and `report` read a folder in one way: the same refusals, rows and notes."""

import pytest
from invented import pacs_experiment, write_run
from typer.testing import CliRunner

from fedsim.commands.cli import app
from fedsim.results.environment import read_environment
from fedsim.results.recorder import Recorder

COMMANDS = ("compare", "plot", "report")


def said(command, folder, *options):
    """What a command answers: its refusal, or the text that a reader sees, with the report's page."""
    result = CliRunner().invoke(app, [command, str(folder), *options])
    page = folder / "report.html"
    read = page.read_text() if command == "report" and page.is_file() else result.output
    return str(result.exception) if result.exception else read


@pytest.mark.parametrize("command", COMMANDS)
def test_runs_that_differ_are_refused_or_told_apart(command, tmp_path, unrendered):
    for rate in (0.1, 0.5):
        write_run(tmp_path / f"{rate}", pacs_experiment(train={"rounds": 1, "lr": rate}))
    assert "more than method, target and seed: train.lr (0.1 | 0.5)" in said(command, tmp_path)
    assert not (tmp_path / "plots").exists()
    found = " ".join(said(command, tmp_path, "--by", "train.lr").split())
    assert "One seed" in found
    assert command == "plot" or "fedavg (lr=0.5)" in found


@pytest.mark.parametrize("command", COMMANDS)
def test_runs_on_other_images_are_refused(command, tmp_path):
    for target, content in (("photo", "a"), ("sketch", "b")):
        folder = write_run(tmp_path, pacs_experiment("fedavg", target, train={"rounds": 1}))
        data = {"cartoon": {"images": 9, "content": content}}
        Recorder(folder).write_environment(read_environment(folder) | {"data": data})
    assert "different images under the name 'cartoon'" in said(command, tmp_path)
