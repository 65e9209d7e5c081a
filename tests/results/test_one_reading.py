"""`compare`, `plot` and `report` read a folder in one way: the same refusals, rows and notes."""

import pytest
from invented import pacs_experiment, write_run
from typer.testing import CliRunner

from fedsim.commands.cli import app
from fedsim.methods.assembly import build_recipe
from fedsim.methods.variants import recipe_record
from fedsim.results import compare, read_runs
from fedsim.results.environment import read_environment
from fedsim.results.recorder import Recorder
from fedsim.settings.experiment import read_experiment

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


def test_a_grid_over_a_part_keeps_the_published_rows_of_all_methods(tmp_path):
    """FedAvg's settings hold the part of the grid, which its recipe does not have."""
    align = "parts.semantic_calibration.align"
    for method, value in (("fedavg", "cross"), ("csac", "cross"), ("csac", "logits")):
        experiment = read_experiment("pacs", ["run.target=photo", f"method.name={method}", f"{align}={value}"], "csac")
        folder = write_run(tmp_path / value, experiment)
        Recorder(folder).write_environment(recipe_record(experiment, build_recipe(experiment)))
    published = compare(read_runs(tmp_path), by=[align]).published
    assert set(zip(published["method"], published["source"])) == {("fedavg", "CSAC Table I"), ("csac", "CSAC Table I")}
