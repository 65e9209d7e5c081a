"""The table of a paper makes the checks of any comparison: other images, other recipes, runs that are there twice."""

import io
import json
import math

import pytest
from rich.console import Console
from test_reproduction import finished
from typer.testing import CliRunner

from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.results import read_runs
from fedsim.results.selection import RULE_TITLES
from fedsim.sweep.reproduction import Line, Numbers, reproductions
from fedsim.sweep.reproduction_texts import show
from fedsim.sweep.tables import PaperRow, find_table

NAME = "fedig-a-table-5"
DOMAINS = ("art_painting", "cartoon", "photo", "sketch")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "table.toml").write_text(find_table(NAME).read_text())
    for seed in (0, 1):
        for target in DOMAINS:
            finished(tmp_path, NAME, "pacs", 0, target, seed, 0.8)
    return tmp_path


def record(folder, method="fedavg", target="photo", seed=0, **facts):
    run = folder / "pacs" / method / target / f"seed{seed}"
    (run / "environment.json").write_text(json.dumps(facts))


def shown(folder):
    buffer = io.StringIO()
    show(reproductions(folder, read_runs(folder)), Console(file=buffer, width=200))
    return buffer.getvalue()


def test_other_images_are_refused(folder):
    record(folder, data={"sketch": {"images": 3, "content": "aa"}})
    record(folder, target="cartoon", data={"sketch": {"images": 4, "content": "bb"}})
    with pytest.raises(UserError, match="different images under the name 'sketch'"):
        shown(folder)


def test_other_recipes_of_one_row_are_refused(folder):
    for target, mu in (("photo", 0.1), ("sketch", 0.2)):
        record(folder, target=target, recipe={"terms.proximal": {"mu": mu}})
    with pytest.raises(UserError, match="FedAvg was not the same recipe"):
        shown(folder)


def test_a_run_that_is_there_twice_is_refused(folder):
    finished(folder, NAME, "pacs", 0, "photo", 0, 0.2, ["run.label=again"])
    with pytest.raises(UserError, match="FedAvg on photo with seed 0 is there more than once") as caught:
        shown(folder)
    assert "fedavg@again/photo/seed0" in str(caught.value)


def test_a_complete_row_has_no_notes_on_its_runs(folder):
    text = shown(folder)
    for word in ("Missing", "left out", "Not the same", "(2 seeds)", "rests on fewer"):
        assert word not in text


def test_missing_unfinished_and_other_versions_are_said(folder):
    finished(folder, NAME, "pacs", 1, "photo", 0, 0.5)
    record(folder, threads=1)
    record(folder, target="sketch", threads=2)
    open_run = folder / "pacs" / "fedprox" / "sketch" / "seed0"
    open_run.mkdir(parents=True)
    (open_run / "experiment.toml").write_text((folder / "pacs/fedprox/photo/seed0/experiment.toml").read_text())
    text = shown(folder)
    assert "FedAvg (2 seeds)" in text
    assert "FedProx (1 seed)" in text
    assert "FedProx: art_painting (seed 0)" in text
    assert "Seed 1 is only in FedAvg; averages over different seeds do not compare." in text
    assert "1 unfinished run is left out" in text
    assert "Not the same for all runs: threads" in text


def test_an_average_over_fewer_seeds_has_no_verdict(folder):
    finished(folder, NAME, "pacs", 0, "photo", 2, 0.9)
    (line,) = reproductions(folder, read_runs(folder))[0].lines
    assert [line.ours[name].seeds for name in ("photo", "sketch", "average")] == [3, 2, 2]
    line.theirs["average"] = Numbers(0.8, 0.5)
    assert not math.isnan(line.difference("average"))
    assert line.verdict("average") == ""
    text = shown(folder)
    assert "FedAvg (2 to 3 seeds)" in text
    assert "the average rests on fewer seeds than its columns" in text
    even = Line(PaperRow(method="fedavg"), {"average": Numbers(0.8, 0.1, 2)}, {"average": Numbers(0.8, 0.5)})
    assert even.verdict("average") == "inside"


def test_a_part_or_another_rule_does_not_replace_the_file(folder):
    whole, file = ["compare", str(folder)], folder / "comparison.csv"
    assert CliRunner().invoke(app, whole).exit_code == 0
    before = file.read_bytes()
    for words in (["--targets", "photo"], ["--select", "oracle"], ["--baseline", "fedavg"]):
        shown = CliRunner().invoke(app, [*whole, *words])
        assert shown.exit_code == 0, shown.output
        assert ("only targets photo" in shown.output) == ("--targets" in words)
        assert file.read_bytes() == before


@pytest.mark.parametrize("select", ["best_validation", "oracle"])
def test_latex_names_the_rule(folder, select):
    shown = CliRunner().invoke(app, ["compare", str(folder), "--format", "latex", "--select", select]).output
    title = next(line for line in shown.splitlines() if "Tables 5, 7 and 8" in line)
    assert title.startswith("% ")
    assert RULE_TITLES[select] in title
    assert (r"\multicolumn" in shown) == (select == "oracle")


def test_the_title_says_what_selected_the_round(tmp_path):
    """In the words of every other table: here the local models' validation, which is not the table's own."""
    (tmp_path / "table.toml").write_text(find_table(NAME).read_text())
    finished(tmp_path, NAME, "pacs", 0, "photo", 0, 0.8, ["run.select_on=local"])
    (result,) = reproductions(tmp_path, read_runs(tmp_path))
    assert result.title.endswith(": best source validation of the local models")
