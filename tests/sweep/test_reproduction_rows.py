"""The rows and targets of a table: one recipe each, one spelling, and the checks that any comparison of runs makes."""

import json
import math
import shutil

import pytest
from paper_runs import ROWS, compared, finish, own_table, shipped, shown
from typer.testing import CliRunner

from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.results.selection import RULE_TITLES
from fedsim.sweep.reproduction import Line, Numbers
from fedsim.sweep.tables import Choice, PaperRow, find_table, plan_table, read_table

NAME = "fedig-a-table-5"
BLOCK = shipped(NAME).blocks[0]


@pytest.fixture
def folder(tmp_path):
    """Two seeds of the first row of a shipped table."""
    shutil.copy(find_table(NAME), tmp_path / "table.toml")
    for seed in (0, 1):
        for target in ("art_painting", "cartoon", "photo", "sketch"):
            finish(BLOCK, tmp_path, target, seed, 0.8)
    return tmp_path


def record(folder, target="photo", **facts):
    (folder / "pacs" / "fedavg" / target / "seed0" / "environment.json").write_text(json.dumps(facts))


@pytest.mark.parametrize(("facts", "said"), [
    ([{"data": {"sketch": {"images": n, "content": f"{n}"}}} for n in (3, 4)], "different images under the name"),
    ([{"recipe": {"terms.proximal": {"mu": mu}}} for mu in (0.1, 0.2)], "FedAvg was not the same recipe"),
])  # fmt: skip
def test_other_images_and_recipes_of_one_row_are_refused(folder, facts, said):
    for target, own in zip(("photo", "cartoon"), facts):
        record(folder, target, **own)
    with pytest.raises(UserError, match=said):
        compared(folder)


def test_a_run_that_is_there_twice_is_refused(folder):
    finish(BLOCK, folder, "photo", settings=["run.label=again"])
    with pytest.raises(UserError, match=r"FedAvg on photo with seed 0 is there more .*fedavg@again/photo/seed0"):
        compared(folder)


def test_missing_unfinished_and_other_versions_are_said(folder):
    text = shown(compared(folder))
    for word in ("Missing", "left out", "Not the same", "(2 seeds)", "rests on fewer"):
        assert word not in text
    settings = finish(BLOCK, folder, "photo", row=1) / "experiment.toml"
    record(folder, threads=1)
    record(folder, "sketch", threads=2)
    open_run = folder / "pacs" / "fedprox" / "sketch" / "seed0"
    open_run.mkdir(parents=True)
    shutil.copy(settings, open_run)
    text = shown(compared(folder))
    for words in (
        "FedAvg (2 seeds)", "FedProx (1 seed)", "FedProx: art_painting (seed 0)", "1 unfinished run is left out",
        "Seed 1 is only in FedAvg; averages over different seeds do not compare.", "Not the same for all runs: threads",
    ):  # fmt: skip
        assert words in text


def test_an_average_over_fewer_seeds_has_no_verdict(folder):
    finish(BLOCK, folder, "photo", 2, 0.9)
    result = compared(folder)
    (line,) = result.lines
    assert [line.ours[name].seeds for name in ("photo", "sketch", "average")] == [3, 2, 2]
    line.theirs["average"] = Numbers(0.8, 0.5)
    assert not math.isnan(line.difference("average"))
    assert line.verdict("average") == ""
    text = shown(result)
    assert "FedAvg (2 to 3 seeds)" in text
    assert "the average rests on fewer seeds than its columns" in text
    even = Line(PaperRow(method="fedavg"), {"average": Numbers(0.8, 0.1, 2)}, {"average": Numbers(0.8, 0.5)})
    assert even.verdict("average") == "inside"


def test_only_the_whole_table_under_the_default_rule_is_kept_as_a_file(folder):
    whole = ["compare", str(folder)]
    for words in (["--targets", "photo"], ["--select", "oracle", "--format", "latex"]):
        output = CliRunner().invoke(app, [*whole, *words]).output
        assert ("only targets photo" in output) == ("--targets" in words)
        assert not (folder / "comparison.csv").exists()
    (title,) = [line for line in output.splitlines() if line.startswith("%") and "Tables 5, 7 and 8" in line]
    assert RULE_TITLES["oracle"] in title
    assert r"\multicolumn" in output
    assert CliRunner().invoke(app, whole).exit_code == 0
    assert (folder / "comparison.csv").is_file()


def test_a_row_does_not_average_over_runs_with_different_settings(tmp_path):
    """With one of the seeds it can be compared; settings of a part that the row does not have mix nothing."""
    file = own_table(tmp_path, settings='"train.rounds=2"')
    for target in ("rot0", "rot75"):
        for seed, settings in ((0, ()), (1, ["train.rounds=1"]), (2, ["parts.proximal.mu=0.5"])):
            folder = finish(file, tmp_path, target, seed, settings=settings)
            (folder / "environment.json").write_text('{"recipe": {"local.sgd": {}}}')
    with pytest.raises(UserError) as caught:
        compared(tmp_path)
    assert "\n" not in str(caught.value)
    for words in ("block 'digits'", "'FedAvg'", "train.rounds (2 | 1)", "--seeds"):
        assert words in str(caught.value)
    for seeds, other in (("0,2", False), ("1", True)):
        output = CliRunner().invoke(app, ["compare", str(tmp_path), "--seeds", seeds]).output
        assert ("the settings are not the table's (train.rounds is 1, there 2)" in output) == other
        assert "FedAvg" in output


@pytest.mark.parametrize("where", ["table", "choice"])
def test_a_target_may_be_spelled_otherwise(tmp_path, where):
    """The sweep and the comparison both take the data set's spelling; a target in two spellings is one column."""
    spelled, names = ["Location 100", "location-38"], ["location_100", "location_38"]
    written = [*spelled, "location_100"] if where == "table" else names
    settings = '"model.backbone=digits-cnn", "model.weights=none"'
    file = own_table(tmp_path, config="terra-incognita", targets=json.dumps(written), settings=settings)
    rows = plan_table(file, Choice(targets=spelled if where == "choice" else ()), (), str(tmp_path / "out"))
    assert [cell.experiment.run.target for cell in rows[0].cells] == [name for name in names for _ in range(2)]
    for name in names:
        finish(file, tmp_path, name)
    result = compared(tmp_path)
    assert result.targets == names
    assert set(result.lines[0].ours) == {*names, "average"}
    assert not any("Missing" in note for note in result.notes)


def test_a_table_is_compared_where_its_images_are_not(tmp_path):
    """Its targets are then as its file has them."""
    images = tmp_path / "images"
    for folder in ("alpha/cat", "alpha/dog", "beta/cat", "beta/dog"):
        (images / folder).mkdir(parents=True)
    for root in (images, tmp_path / "elsewhere"):
        file = own_table(tmp_path, targets='["alpha"]', settings=f'"data.dataset=folder", "data.root={root}"')
        if root == images:
            finish(file, tmp_path, "alpha")
        assert compared(tmp_path).targets == ["alpha"]


def test_runs_of_targets_that_the_table_has_no_more_are_left_out_and_named(tmp_path):
    file = own_table(tmp_path)
    finish(file, tmp_path, "rot0")
    finish(file, tmp_path, "rot75", accuracy=0.1)
    finish(file, tmp_path, "rot75", row=1, settings=["method.proximal.mu=0.5"])
    own_table(tmp_path, targets='["rot0"]')
    result = compared(tmp_path)
    assert (result.targets, set(result.lines[0].ours)) == (["rot0"], {"rot0", "average"})
    assert result.lines[0].ours["average"].mean == pytest.approx(0.5)
    named = "fedavg on rot75 (1 run); fedprox@proximal.mu=0.5 on rot75 (1 run)"
    assert f"Runs on no target of the table, which are left out: {named}." in result.notes
    own_table(tmp_path, targets='["rot45"]')
    assert compared(tmp_path).lines == []
    assert CliRunner().invoke(app, ["compare", str(tmp_path)]).exit_code == 0


PAIR = '{{ method = "{}", printed = "A" }}, {{ method = "{}", printed = "{}"{} }}'.format


@pytest.mark.parametrize(("rows", "targets", "said"), [
    (PAIR("fedavg", "fedavg", "B", ""), '["rot0"]', "block 'digits' of the table: the rows 'A' and 'B' have the same"),
    (PAIR("fedprox", "fedprox", "B", ', settings = ["method.proximal.mu=0.1"]'), '["rot0"]', "have the same recipe"),
    (PAIR("fedavg", "fedprox", "A", ""), '["rot0"]', "table.toml: block 'digits': two rows are called 'A'"),
    ('{ method = "fedavg" }, { method = "fedavg" }', '["rot0"]', "two rows are called 'fedavg'"),
    (ROWS, '["rot0", "rot99"]', r"block 'digits' of the table: .* has no domain 'rot99'"),
])  # fmt: skip
def test_a_wrong_row_or_target_names_its_block(tmp_path, rows, targets, said):
    """Two rows with one recipe would be the same runs, and one of them would not be shown."""
    file = own_table(tmp_path, rows, targets)
    with pytest.raises(UserError, match=said):
        plan_table(file, Choice(), (), str(tmp_path / "out"))
    if "have the same" in said:
        finish(read_table(file).blocks[0], tmp_path, "rot0")
        with pytest.raises(UserError, match=said):
            compared(tmp_path)


def test_a_row_whose_parts_do_not_fit_together_does_not_stop_the_others(tmp_path):
    """Its cells fail with their reason; it has no runs, so that the comparison has no line of it."""
    file = own_table(tmp_path, '{ method = "fedavg" }, { method = "krum+qfedavg" }, { method = "fedprox" }')
    rows = plan_table(file, Choice(), (), str(tmp_path / "out"))
    assert [{cell.state for cell in row.cells} for row in rows] == [{"waiting"}, {"failed"}, {"waiting"}]
    finish(file, tmp_path, "rot0")
    assert [line.row.method for line in compared(tmp_path).lines] == ["fedavg"]


def test_all_targets_are_those_that_select_no_round(tmp_path):
    file = own_table(tmp_path, ROWS, '["all"]', "terra-incognita", '"run.validation_domain=location_38"', "[0]")
    rows = plan_table(file, Choice(["fedavg"]), (), str(tmp_path / "out"))
    assert [cell.experiment.run.target for cell in rows[0].cells] == ["location_100", "location_43", "location_46"]


def test_the_title_says_what_selected_the_round(tmp_path):
    finish(own_table(tmp_path), tmp_path, "rot0", settings=["run.select_on=local"])
    assert compared(tmp_path).title.endswith(": best source validation of the local models")
