"""The papers' tables as experiments: all names in their files exist, and printed numbers are shown next to ours."""

import json
import math
import shutil

import pytest
from paper_runs import ROWS, compared, finish, own_table, shipped, shown
from typer.testing import CliRunner

from fedsim.analysis.published import domain_key, printed_numbers
from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.data import benchmark
from fedsim.methods.assembly import build_recipe
from fedsim.records import Recorder, read_runs
from fedsim.records.selection import RULE_TITLES
from fedsim.settings.experiment import known_tables
from fedsim.studies.reproduction import Line, Numbers, csv_rows, render, reproduce, reproductions
from fedsim.studies.tables import Choice, PaperRow, find_table, plan_table, row_experiment

SEEDS = {"fedig": 4, "csac": 5, "gperxan": 3, "fedsb": 3}  # the papers'


@pytest.mark.parametrize("name", sorted(known_tables()))
def test_every_row_is_a_method_with_settings_that_exist(name):
    """Each row has another recipe or measures something else, each target is a domain, and nothing printed is left out
    without a reason."""
    assert len(shipped(name).seeds) == SEEDS[name.split("-")[0]]
    for block in shipped(name).blocks:
        experiments = [row_experiment(block, row) for row in block.rows]
        recipes = {(repr(build_recipe(row_experiment(block, row))), row.measures) for row in block.rows}
        assert len(recipes) == len(block.rows)
        assert block.targets == ["all"] or set(block.targets) <= set(benchmark(experiments[0].data).domains)
        if block.published:
            printed = printed_numbers(block.published, experiments[0])
            named = [row.printed for row in block.rows] + [absent.printed for absent in block.absent]
            assert sorted(named) == sorted(set(printed["method"]))
        else:
            assert name not in ("fedsb", "gperxan-regulariser") or "not known here" in shipped(name).deviation
        assert all(absent.why for absent in block.absent)


def small_table(folder, rows='{ method = "fedavg", printed = "FedAvg" }', seeds="[0, 1]"):
    settings = '"data.fraction=0.1", "train.rounds=2"'
    other = f'[[blocks]]\nconfig = "digits"\nname = "other"\nsettings = [{settings}]\ntargets = ["rot75"]\n'
    rows = f'{rows}, {{ method = "fedprox", settings = ["method.proximal.mu=0.5"] }}'
    return own_table(folder, rows, '["rot0", "rot15"]', settings=settings, seeds=seeds, more=other)


def test_cells_are_blocks_times_rows_times_targets_times_seeds(tmp_path):
    file = small_table(tmp_path)
    rows = plan_table(file, Choice(), (), str(tmp_path / "out"))
    assert [(row.block.name, row.row.method, len(row.cells)) for row in rows] == [
        ("digits", "fedavg", 4), ("digits", "fedprox", 4), ("other", "fedavg", 2), ("other", "fedprox", 2),
    ]  # fmt: skip
    folder = rows[1].cells[0].folder
    assert folder == tmp_path / "out" / "digits" / "fedprox@proximal.mu=0.5" / "rot0" / "seed0"
    chosen = plan_table(file, Choice(["FedAvg"], ["rot75"], [7]), (), str(tmp_path))
    assert [(row.block.name, len(row.cells)) for row in chosen] == [("other", 1)]
    assert chosen[0].cells[0].experiment.run.seed == 7


@pytest.mark.parametrize(("file", "choice", "overrides", "said"), [
    ({}, Choice(["fedavgg"]), [], "no row 'fedavgg'; did you mean 'fedavg'"),
    ({}, Choice(targets=["rot0", "rot90"]), [], "--targets rot90: no block of the table has this domain"),
    ({}, Choice(), ["name=mine"], "the table's file sets this"),
    ({"rows": '{ method = "fedavg", settings = ["train.lr=1.0"] }'}, Choice(), [], "applies to a whole block"),
    ({"seeds": "[]"}, Choice(), [], "seeds"),
    ({"rows": '{ method = "fedafg" }'}, Choice(), [], "block 'digits' of the table: .*fedafg"),
])  # fmt: skip
def test_a_wrong_choice_or_file_is_one_line(tmp_path, file, choice, overrides, said):
    with pytest.raises(UserError, match=said):
        plan_table(small_table(tmp_path, **file), choice, overrides, str(tmp_path))


def test_a_choice_of_which_no_block_has_both_rows_and_targets_is_one_line(tmp_path):
    other = '[[blocks]]\nconfig = "digits"\nname = "other"\nrows = [{ method = "scaffold" }]\ntargets = ["rot75"]\n'
    file = own_table(tmp_path, targets='["rot0"]', more=other)
    with pytest.raises(UserError, match="no block of the table has such a row and such a target"):
        plan_table(file, Choice(["scaffold"], ["rot0"]), (), str(tmp_path))


def test_inside_is_at_most_the_printed_deviation():
    line = Line(PaperRow(method="fedavg"), {"a": Numbers(0.823, 0.01, 3)})
    for printed, verdict in ((0.005, "inside"), (0.0049, "outside"), (math.nan, "")):
        line.theirs["a"] = Numbers(0.818, printed)
        assert (line.difference("a"), line.verdict("a")) == (pytest.approx(0.005), verdict)
    line.unlike = ["data.image_size is 64, there 224"]
    assert math.isnan(line.difference("a"))
    assert math.isnan(line.difference("b"))


def test_ours_stand_beside_theirs(tmp_path):
    """FedAvg of Table 5 on PACS; FedProx with another holdout, and with a mu of no row; a label that is another run."""
    block = shipped("fedig-a-table-5").blocks[0]
    printed = printed_numbers("FedIG-A Table 5", row_experiment(block, block.rows[0]))
    printed = printed[printed["method"] == "FedAvg"].set_index("target")
    art = printed.loc["artpainting"]  # 77.83 ± 0.92
    for seed, gap in ((0, 0.001), (1, 0.003)):
        for target in ("art_painting", "cartoon", "photo", "sketch"):
            finish(block, tmp_path, target, seed, printed.loc[domain_key(target), "mean"] + gap)
    finish(block, tmp_path, "photo", row=1, settings=["data.holdout=0.1"])
    for seed in (0, 1):
        finish(block, tmp_path, "photo", seed, row=1, settings=["method.proximal.mu=0.5"])
    shutil.copy(find_table("fedig-a-table-5"), tmp_path / "table.toml")
    result = compared(tmp_path)
    fedavg, fedprox = result.lines
    assert (fedavg.row.printed, fedprox.row.printed) == ("FedAvg", "FedProx")
    assert fedavg.ours["art_painting"].mean == pytest.approx(art["mean"] + 0.002)
    assert fedavg.ours["art_painting"].std == pytest.approx(0.002 / math.sqrt(2))
    assert fedavg.theirs["art_painting"] == Numbers(art["mean"], art["std"])
    assert fedavg.difference("average") == pytest.approx(0.002, abs=1e-4)  # the paper rounds its average
    assert fedavg.verdict("art_painting") == ("inside" if art["std"] >= 0.002 else "outside")
    assert fedavg.verdict("average") == ""  # no ± is printed there
    assert fedprox.unlike == ["data.holdout is 0.1, there 0.2"]
    assert math.isnan(fedprox.difference("photo"))
    text = shown(result)
    assert "+0.2 inside" in text
    assert "FedProx: the settings are not the table's (data.holdout is 0.1, there 0.2)" in text
    assert "Runs of no row of the table, which are left out: fedprox@proximal.mu=0.5 (2 runs)." in result.notes
    assert {row["verdict"] for row in csv_rows([result])} == {"inside", ""}
    for form in ("csv", "markdown", "latex"):
        assert "FedAvg" in render([result], form)
        assert "FedIG-A Table 5" in render([result], form)
    runs = read_runs(tmp_path)
    runs.summary.loc[runs.summary["method"] == "fedavg", "label"] = "fedavg(pixel)"  # as CCST without its encoder
    assert reproductions(tmp_path, runs)[0].lines[0].unlike[0] == "it runs as fedavg(pixel)"


def test_a_printed_average_is_over_all_domains_and_stands_beside_no_other(tmp_path):
    """A block of two of the four domains has an average of two, which is not the paper's of four."""
    table = shipped("fedig-a-table-5")
    block = table.blocks[0]
    for target in ("photo", "sketch"):
        finish(block, tmp_path, target)
    runs = read_runs(tmp_path)
    part = block.model_copy(update={"targets": ["photo", "sketch"]})
    (fedavg,) = reproduce(table, part, runs, "best_validation").lines
    assert fedavg.theirs.keys() == {"photo", "sketch"}
    assert fedavg.ours.keys() == {"photo", "sketch", "average"}
    assert math.isnan(fedavg.difference("average"))
    assert "average" in reproduce(table, block, runs, "best_validation").lines[0].theirs


def inside_table(folder):
    """Three rows of one recipe: clients with their own tensors and without, and the unseen domain."""
    rows = [f'{{ method = "fedbn", measures = "{kind}", printed = "{kind}" }}' for kind in ("personal", "received")]
    return own_table(folder, ", ".join([*rows, '{ method = "fedbn" }']), '["rot0", "rot15", "rot30"]')


def test_clients_inside_the_federation_by_hand(tmp_path):
    """Rows of one recipe that measure different things share its runs. A domain's number is the mean over the runs in
    which it is not the unseen one, of the selected round: rot0 has (.9 + .7) / 2, rot15 (.5 + .8) / 2, rot30 (.6 +
    .4) / 2 with the clients' own tensors, and .1 less without."""
    file = inside_table(tmp_path)
    personal = {"rot0": {"rot15": 0.5, "rot30": 0.6}, "rot15": {"rot0": 0.9, "rot30": 0.4},
                "rot30": {"rot0": 0.7, "rot15": 0.8}}  # fmt: skip
    for target, clients in personal.items():
        recorder = Recorder(finish(file, tmp_path, target, accuracy=0.3))
        rows = []
        for number, shift in ((0, 0.3), (1, 0.0)):  # round 1 is the selected one
            for client, value in clients.items():
                value -= shift
                rows.append({"round": number, "client": client, "domain": client, "validation_accuracy": value - 0.1,
                             "personal_accuracy": value})  # fmt: skip
        recorder.clients.append(rows)
    own, received, unseen = compared(tmp_path).lines
    assert {target: numbers.mean for target, numbers in own.ours.items()} == pytest.approx(
        {"rot0": 0.8, "rot15": 0.65, "rot30": 0.5, "average": 0.65}
    )
    assert received.ours["rot15"].mean == pytest.approx(0.55)
    assert {numbers.mean for numbers in unseen.ours.values()} == {0.3}
    (note,) = [note for note in compared(tmp_path).notes if "validation images of clients that train" in note]
    assert note.startswith("personal, received: ")


def test_runs_without_the_clients_own_validation_are_refused(tmp_path):
    file = inside_table(tmp_path)
    finish(file, tmp_path, "rot0")
    with pytest.raises(UserError, match=r"'personal' of the table needs personal_accuracy .* run\.personalised=true"):
        compared(tmp_path)


def test_two_rows_that_measure_the_same_of_one_recipe_are_refused(tmp_path):
    rows = ", ".join(f'{{ method = "fedbn", measures = "personal", printed = "{name}" }}' for name in "ab")
    with pytest.raises(UserError, match="the rows 'a' and 'b' have the same recipe"):
        plan_table(own_table(tmp_path, rows), Choice(), (), str(tmp_path))


NAME = "fedig-a-table-5"
BLOCK = shipped(NAME).blocks[0]


@pytest.fixture
def folder(tmp_path):
    shutil.copy(find_table(NAME), tmp_path / "table.toml")
    for seed in (0, 1):
        for target in ("art_painting", "cartoon", "photo", "sketch"):
            finish(BLOCK, tmp_path, target, seed, 0.8)
    return tmp_path


def record(folder, target="photo", **facts):
    (folder / "pacs" / "fedavg" / target / "seed0" / "environment.json").write_text(json.dumps({"format": 1} | facts))


def test_other_recipes_of_one_row_and_a_run_that_is_there_twice_are_refused(folder):
    for target, mu in (("photo", 0.1), ("cartoon", 0.2)):
        record(folder, target, recipe={"terms.proximal": {"mu": mu}})
    with pytest.raises(UserError, match="FedAvg was not the same recipe"):
        compared(folder)
    record(folder)
    record(folder, "cartoon")
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
            (folder / "environment.json").write_text('{"format": 1, "recipe": {"local.sgd": {}}}')
    with pytest.raises(UserError) as caught:
        compared(tmp_path)
    assert "\n" not in str(caught.value)
    for words in ("block 'digits'", "'FedAvg'", "train.rounds (2 | 1)", "--seeds"):
        assert words in str(caught.value)
    for seeds, other in (("0,2", False), ("1", True)):
        output = CliRunner().invoke(app, ["compare", str(tmp_path), "--seeds", seeds]).output
        assert ("the settings are not the table's (train.rounds is 1, there 2)" in output) == other
        assert "FedAvg" in output


def test_a_wrong_row_or_target_names_its_block(tmp_path):
    """Two rows with one recipe would be the same runs, and one of them would not be shown."""
    one = '{ method = "fedprox", printed = "A" }'
    same = '{ method = "fedprox", printed = "B", settings = ["method.proximal.mu=0.1"] }'
    for rows, targets, said in (
        (f"{one}, {one}", '["rot0"]', "block 'digits': two rows are called 'A'"),
        (ROWS, '["rot0", "rot99"]', "block 'digits' of the table: .* has no domain 'rot99'"),
        (f"{one}, {same}", '["rot0"]', "the rows 'A' and 'B' have the same recipe"),
    ):
        file = own_table(tmp_path, rows, targets)
        with pytest.raises(UserError, match=said):
            plan_table(file, Choice(), (), str(tmp_path / "out"))
    finish(file, tmp_path, "rot0")
    with pytest.raises(UserError, match=said):
        compared(tmp_path)
