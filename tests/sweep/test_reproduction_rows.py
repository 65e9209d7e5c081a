"""The rows and targets of a user's own table: one recipe each, one spelling, and runs with the same settings."""

import pandas as pd
import pytest
from typer.testing import CliRunner

from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.results import Recorder, read_runs, summary_row
from fedsim.run.plan import resolve
from fedsim.sweep.reproduction import reproductions
from fedsim.sweep.tables import Choice, plan_table, read_table, row_experiment

ROWS = '{ method = "fedavg", printed = "FedAvg" }, { method = "fedprox" }'


def own_table(folder, rows=ROWS, targets='["rot0", "rot75"]', config="digits", settings="", seeds="[0, 1]"):
    """The file of a table, with the name of the copy that a sweep puts beside the runs."""
    file = folder / "table.toml"
    block = f'config = "{config}"\ntargets = {targets}\nsettings = [{settings}]\n'
    file.write_text(f'title = "Own"\ndeviation = "none"\nseeds = {seeds}\nrows = [{rows}]\n[[blocks]]\n{block}')
    return file


def record(file, target, seed=0, accuracy=0.5, row=0, overrides=()):
    """A finished run of one of the table's rows, with an invented accuracy."""
    (block,) = read_table(file).blocks
    words = [f"run.seed={seed}", f"run.output={file.parent}", *overrides]
    plan = resolve(row_experiment(block, block.rows[row], target, words))
    recorder = Recorder(plan.folder)
    recorder.write_experiment(plan.experiment.toml())
    rounds = pd.DataFrame([{"round": 1, "mean_validation_accuracy": 0.9, "target_accuracy": accuracy}])
    recorder.write_summary(summary_row(plan.experiment, rounds, label=plan.folder.parent.parent.name))


def compared(folder):
    (result,) = reproductions(folder, read_runs(folder))
    return result


def test_a_row_does_not_average_over_runs_with_different_settings(tmp_path):
    file = own_table(tmp_path, settings='"train.rounds=2"')
    for target in ("rot0", "rot75"):
        record(file, target, seed=0)
        record(file, target, seed=1, overrides=["train.rounds=1"])
    with pytest.raises(UserError) as caught:
        compared(tmp_path)
    text = str(caught.value)
    assert "\n" not in text
    for words in ("block 'digits'", "'FedAvg'", "train.rounds (2 | 1)", "--seeds"):
        assert words in text


def test_the_part_with_one_setting_is_compared(tmp_path):
    """So the refused table can be shown: its runs with the other setting are not the table's, which a note says."""
    file = own_table(tmp_path, settings='"train.rounds=2"')
    record(file, "rot0", seed=0)
    record(file, "rot0", seed=1, overrides=["train.rounds=1"])
    refused = CliRunner().invoke(app, ["compare", str(tmp_path)])
    assert isinstance(refused.exception, UserError)
    for seed, said in ((0, False), (1, True)):
        shown = CliRunner().invoke(app, ["compare", str(tmp_path), "--seeds", str(seed)])
        assert shown.exit_code == 0, shown.output
        assert ("the settings are not the table's (train.rounds is 1, there 2)" in shown.output) == said


def test_rows_may_have_other_settings_than_each_other(tmp_path):
    """The row with other settings is shown without a difference; it has no average in common with the others."""
    file = own_table(tmp_path, settings='"train.rounds=2"')
    record(file, "rot0")
    record(file, "rot0", row=1, overrides=["train.rounds=1"])
    assert [bool(line.unlike) for line in compared(tmp_path).lines] == [False, True]


def test_settings_of_a_part_that_the_row_does_not_have_mix_nothing(tmp_path):
    file = own_table(tmp_path)
    record(file, "rot0", seed=0)
    record(file, "rot0", seed=1, overrides=["parts.proximal.mu=0.5"])
    for path in tmp_path.glob("digits/fedavg/rot0/seed*"):
        (path / "environment.json").write_text('{"recipe": {"local.sgd": {}}}')
    assert compared(tmp_path).lines[0].ours["rot0"].seeds == 2


@pytest.mark.parametrize("where", ["table", "choice"])
def test_a_target_may_be_spelled_otherwise(tmp_path, where):
    """The sweep and the comparison both take the data set's spelling, as every command does."""
    spelled = ["Location 100", "location-38"]
    names = ["location_100", "location_38"]
    written = str(spelled if where == "table" else names).replace("'", '"')
    file = own_table(tmp_path, config="terra-incognita", targets=written)
    choice = Choice(targets=spelled if where == "choice" else ())
    rows = plan_table(file, choice, (), str(tmp_path / "out"))
    assert [cell.experiment.run.target for cell in rows[0].cells] == [name for name in names for _ in range(2)]
    for name in names:
        record(file, name)
    result = compared(tmp_path)
    assert result.targets == names
    assert set(result.lines[0].ours) == {*names, "average"}
    assert not any("Missing" in note for note in result.notes)


def test_a_target_in_two_spellings_is_one_column(tmp_path):
    file = own_table(tmp_path, config="terra-incognita", targets='["Location 100", "location_100"]')
    assert len(plan_table(file, Choice(["fedavg"], seeds=[0]), (), str(tmp_path / "out"))[0].cells) == 1
    record(file, "location_100")
    assert compared(tmp_path).targets == ["location_100"]


def test_a_wrong_target_names_its_block(tmp_path):
    file = own_table(tmp_path, targets='["rot0", "rot99"]')
    with pytest.raises(UserError, match=r"block 'digits' of the table: .* has no domain 'rot99'"):
        plan_table(file, Choice(), (), str(tmp_path / "out"))


def test_a_table_is_compared_where_its_images_are_not(tmp_path):
    """Its targets are then as its file has them."""
    images = tmp_path / "images"
    for domain in ("alpha", "beta"):
        for name in ("cat", "dog"):
            (images / domain / name).mkdir(parents=True)
    for root in (images, tmp_path / "elsewhere"):
        settings = f'"data.dataset=folder", "data.root={root}"'
        file = own_table(tmp_path, targets='["alpha"]', settings=settings)
        if root == images:
            record(file, "alpha")
        assert compared(tmp_path).targets == ["alpha"]


def test_runs_of_targets_that_the_table_has_no_more_are_left_out_and_named(tmp_path):
    file = own_table(tmp_path)
    record(file, "rot0")
    record(file, "rot75", accuracy=0.1)
    record(file, "rot75", row=1, overrides=["method.proximal.mu=0.5"])
    own_table(tmp_path, targets='["rot0"]')
    result = compared(tmp_path)
    assert result.targets == ["rot0"]
    assert set(result.lines[0].ours) == {"rot0", "average"}
    assert result.lines[0].ours["average"].mean == pytest.approx(0.5)
    named = "fedavg on rot75 (1 run); fedprox@proximal.mu=0.5 on rot75 (1 run)"
    assert f"Runs on no target of the table, which are left out: {named}." in result.notes
    own_table(tmp_path, targets='["rot45"]')
    result = compared(tmp_path)
    assert result.lines == []
    assert any("fedavg on rot0 (1 run); fedavg on rot75 (1 run)" in note for note in result.notes)
    assert CliRunner().invoke(app, ["compare", str(tmp_path)]).exit_code == 0


SAME_RECIPE = [
    '{ method = "fedavg", printed = "A" }, { method = "fedavg", printed = "B" }',
    '{ method = "fedprox", printed = "A" }, '
    '{ method = "fedprox", printed = "B", settings = ["method.proximal.mu=0.1"] }',
]


@pytest.mark.parametrize("rows", SAME_RECIPE)
def test_two_rows_with_one_recipe_are_refused(tmp_path, rows):
    """They would be the same runs, and one of the rows would not be shown."""
    file = own_table(tmp_path, rows)
    with pytest.raises(UserError, match=r"block 'digits' of the table: the rows 'A' and 'B' have the same recipe"):
        plan_table(file, Choice(), (), str(tmp_path / "out"))
    record(file, "rot0")
    with pytest.raises(UserError, match=r"block 'digits' of the table: the rows 'A' and 'B' have the same recipe"):
        compared(tmp_path)


@pytest.mark.parametrize(
    "rows",
    [
        '{ method = "fedavg", printed = "A" }, { method = "fedprox", printed = "A" }',
        '{ method = "fedavg" }, { method = "fedavg" }',
    ],
)
def test_two_rows_with_one_title_are_refused(tmp_path, rows):
    with pytest.raises(UserError, match=r"table.toml: block 'digits': two rows are called '\w+'"):
        read_table(own_table(tmp_path, rows))


def test_a_row_whose_parts_do_not_fit_together_does_not_stop_the_others(tmp_path):
    """Its cells fail with their reason; it has no runs, so that the comparison has no line of it."""
    file = own_table(tmp_path, '{ method = "fedavg" }, { method = "krum+qfedavg" }, { method = "fedprox" }')
    rows = plan_table(file, Choice(), (), str(tmp_path / "out"))
    assert [{cell.state for cell in row.cells} for row in rows] == [{"waiting"}, {"failed"}, {"waiting"}]
    record(file, "rot0")
    assert [line.row.method for line in compared(tmp_path).lines] == ["fedavg"]
