"""The papers' tables as experiments: all names in their files exist, and printed numbers are shown beside ours."""

import io
import math
import re
from functools import cache

import pandas as pd
import pytest
from rich.console import Console
from support import run_small
from typer.testing import CliRunner

from clients.terms.proximal import Proximal
from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.data import benchmark
from fedsim.methods.assembly import build_recipe
from fedsim.results import Recorder, read_runs, summary_row
from fedsim.results.published import printed_numbers
from fedsim.run.plan import resolve
from fedsim.settings.experiment import known_tables
from fedsim.sweep.reproduction import Line, Numbers, reproductions
from fedsim.sweep.reproduction_texts import csv_rows, show
from fedsim.sweep.tables import Choice, PaperRow, find_table, plan_table, read_table, row_experiment

TABLES = [
    "csac-table-1", "csac-table-2", "csac-table-3", "csac-table-4", "csac-table-5", "fedig-a-table-1",
    "fedig-a-table-2", "fedig-a-table-3", "fedig-a-table-5", "fedig-a-table-6", "fedig-a-table-9", "fedsb",
    "gperxan-regulariser", "gperxan-table-2", "gperxan-table-3", "gperxan-table-4",
]  # fmt: skip


@cache
def table(name):
    return read_table(find_table(f"tables/{name}.toml"))


BLOCKS = [(name, block.name) for name in TABLES for block in table(name).blocks]


def block_of(name, block):
    return next(each for each in table(name).blocks if each.name == block)


def test_every_table_is_here():
    assert set(TABLES) <= set(known_tables())


@pytest.mark.parametrize(("name", "block"), BLOCKS)
def test_every_row_is_a_method_with_settings_that_exist(name, block):
    """Each row has another recipe, and each target is a domain."""
    own = block_of(name, block)
    recipes = [build_recipe(row_experiment(own, row)) for row in own.rows]
    assert len({repr(recipe) for recipe in recipes}) == len(own.rows)
    domains = benchmark(row_experiment(own, own.rows[0]).data).domains
    assert own.targets == ["all"] or set(own.targets) <= set(domains)


@pytest.mark.parametrize(("name", "block"), [pair for pair in BLOCKS if block_of(*pair).published])
def test_rows_and_absent_rows_are_the_printed_ones(name, block):
    """Nothing of the paper's table is left out without a reason, and every name is spelled as in published.csv."""
    own = block_of(name, block)
    experiment = row_experiment(own, own.rows[0])
    printed = printed_numbers(own.published, experiment)
    named = [row.printed for row in own.rows] + [absent.printed for absent in own.absent]
    assert sorted(named) == sorted(set(printed["method"]))
    assert all(absent.why for absent in own.absent)


def test_tables_without_printed_numbers_say_so():
    for name in ("fedsb", "gperxan-regulariser"):
        assert not any(block.published for block in table(name).blocks)
        assert "not known here" in table(name).deviation


def test_seeds_are_the_papers():
    counts = {"fedig": 4, "csac": 5, "gperxan": 3, "fedsb": 3}
    assert {name: len(table(name).seeds) for name in TABLES} == {name: counts[name.split("-")[0]] for name in TABLES}


def test_fedprox_has_the_mu_that_its_file_states():
    own = block_of("fedig-a-table-5", "pacs")
    (stated,) = re.findall(r"FedProx's mu is ([\d.]+\d)", find_table("fedig-a-table-5").read_text())
    (row,) = [row for row in own.rows if row.method == "fedprox"]
    assert build_recipe(row_experiment(own, row)).terms == (Proximal(float(stated)),)


def small_table(folder, **change):
    """A table of two blocks on digits, with one row that is a variant."""
    words = {"title": "Small", "seeds": "[0, 1]", "rows": '{ method = "fedavg", printed = "FedAvg" }'} | change
    file = folder / "small.toml"
    file.write_text(
        f"""title = "{words["title"]}"
deviation = "invented"
seeds = {words["seeds"]}
rows = [{words["rows"]}, {{ method = "fedprox", settings = ["method.proximal.mu=0.5"] }}]
[[blocks]]
config = "digits"
settings = ["data.fraction=0.1", 'data.domains=["rot0", "rot15", "rot30"]', "train.rounds=2"]
targets = ["rot0", "rot15"]
[[blocks]]
config = "digits"
name = "other"
settings = ["data.fraction=0.1", "train.rounds=2"]
targets = ["rot75"]
"""
    )
    return file


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


@pytest.mark.parametrize(
    ("choice", "overrides", "said"),
    [
        (Choice(["fedavgg"]), [], "no row 'fedavgg'; did you mean 'fedavg'"),
        (Choice(targets=["rot90"]), [], "--targets rot90: no block of the table has this domain"),
        (Choice(targets=["rot0", "rot90"]), [], "--targets rot90: no block of the table has this domain"),
        (Choice(), ["name=mine"], "the table's file sets this"),
        (Choice(), ["train.roundz=1"], "train.roundz"),
    ],
)
def test_a_wrong_choice_is_one_line(tmp_path, choice, overrides, said):
    with pytest.raises(UserError, match=said):
        plan_table(small_table(tmp_path), choice, overrides, str(tmp_path))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": '{ metod = "fedavg" }'}, "rows.0"),
        ({"rows": '{ method = "fedavg", settings = ["train.lr=1.0"] }'}, "applies to a whole block"),
        ({"seeds": "[]"}, "seeds"),
        ({"rows": '{ method = "fedafg" }'}, "block 'digits' of the table: .*fedafg"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, change, said):
    with pytest.raises(UserError, match=said):
        plan_table(small_table(tmp_path, **change), Choice(), (), str(tmp_path))


def test_names_of_tables_and_experiments(tmp_path):
    assert find_table("fedig-a-table-2") == find_table("tables/fedig-a-table-2.toml")
    assert find_table("configs/tables/fedig-a-table-2") == find_table("fedig-a-table-2.toml")
    assert find_table("digits") is None
    assert find_table("/no/such/fedig-a-table-2.toml") is None  # then a missing experiment is reported
    with pytest.raises(UserError, match="no table"):
        find_table("mine/tables/fedig-a-table-2.toml")
    assert find_table(str(small_table(tmp_path))) is not None
    with pytest.raises(UserError, match="did you mean 'fedig-a-table-2'"):
        find_table("tables/fedig-a-table-22.toml")


def test_inside_is_at_most_the_printed_deviation():
    line = Line(PaperRow(method="fedavg"), {"a": Numbers(0.823, 0.01, 3)}, {"a": Numbers(0.818, 0.005)})
    assert line.difference("a") == pytest.approx(0.005)
    assert line.verdict("a") == "inside"
    line.theirs["a"] = Numbers(0.818, 0.0049)
    assert line.verdict("a") == "outside"
    line.theirs["a"] = Numbers(0.818)
    assert line.verdict("a") == ""
    line.unlike = ["data.image_size is 64, there 224"]
    assert math.isnan(line.difference("a"))
    assert math.isnan(line.difference("b"))


def finished(root, name, block, row, target, seed, accuracy, overrides=()):
    """A finished run's folder with an invented accuracy."""
    own = block_of(name, block)
    experiment = row_experiment(own, own.rows[row], target, [f"run.seed={seed}", f"run.output={root}", *overrides])
    plan = resolve(experiment)
    recorder = Recorder(plan.folder)
    recorder.write_experiment(plan.experiment.toml())
    rounds = pd.DataFrame([{"round": 1, "mean_validation_accuracy": 0.9, "target_accuracy": accuracy}])
    recorder.write_summary(summary_row(plan.experiment, rounds, label=plan.folder.parent.parent.name))


def test_ours_stand_beside_theirs(tmp_path):
    """FedAvg of Table 5 on PACS: art painting 77.83 ± 0.92 (printed)."""
    printed = printed_numbers("FedIG-A Table 5", row_experiment(*first("fedig-a-table-5"))).set_index(
        ["method", "target"]
    )
    art = printed.loc[("FedAvg", "artpainting")]
    for seed, gap in ((0, 0.001), (1, 0.003)):
        for target in ("art_painting", "cartoon", "photo", "sketch"):
            theirs = printed.loc[("FedAvg", target.replace("_", "")), "mean"]
            finished(tmp_path, "fedig-a-table-5", "pacs", 0, target, seed, theirs + gap)
    finished(tmp_path, "fedig-a-table-5", "pacs", 1, "photo", 0, 0.5, ["data.holdout=0.1"])
    for seed in (0, 1):  # FedProx with another mu, which is no row of the table
        finished(tmp_path, "fedig-a-table-5", "pacs", 1, "photo", seed, 0.5, ["method.proximal.mu=0.5"])
    (tmp_path / "table.toml").write_text(find_table("fedig-a-table-5").read_text())
    (result,) = reproductions(tmp_path, read_runs(tmp_path))
    assert [line.row.printed for line in result.lines] == ["FedAvg", "FedProx"]
    fedavg, fedprox = result.lines
    assert fedavg.ours["art_painting"].mean == pytest.approx(art["mean"] + 0.002)
    assert fedavg.ours["art_painting"].std == pytest.approx(0.002 / math.sqrt(2))
    assert fedavg.theirs["art_painting"] == Numbers(art["mean"], art["std"])
    assert fedavg.difference("average") == pytest.approx(0.002, abs=1e-4)  # the paper rounds its average
    assert fedavg.verdict("art_painting") == ("inside" if art["std"] >= 0.002 else "outside")
    assert fedavg.verdict("average") == ""  # no ± is printed there
    assert fedprox.unlike == ["data.holdout is 0.1, there 0.2"]
    assert math.isnan(fedprox.difference("photo"))
    buffer = io.StringIO()
    show([result], Console(file=buffer, width=200))
    assert "+0.2 inside" in buffer.getvalue()
    assert "FedProx: the settings are not the table's (data.holdout is 0.1, there 0.2)" in buffer.getvalue()
    assert "Runs of no row of the table, which are left out: fedprox@proximal.mu=0.5 (2 runs)." in result.notes
    assert {row["verdict"] for row in csv_rows([result])} == {"inside", ""}
    for form in ("csv", "markdown", "latex"):
        shown = CliRunner().invoke(app, ["compare", str(tmp_path), "--format", form]).output
        assert "FedAvg" in shown
        assert "FedIG-A Table 5" in shown


def first(name):
    block = table(name).blocks[0]
    return block, block.rows[0]


def test_ccst_on_pixels_has_no_difference(tmp_path):
    """Its label names the encoder that was used; the paper's number belongs to VGG-19."""
    rows = [row.printed for row in block_of("gperxan-table-2", "pacs").rows]
    finished(tmp_path, "gperxan-table-2", "pacs", rows.index("FedAvg"), "photo", 0, 0.9)
    finished(tmp_path, "gperxan-table-2", "pacs", rows.index("CCST"), "photo", 0, 0.9)
    runs = read_runs(tmp_path)
    ccst = runs.summary["method"] == "ccst"
    runs.summary.loc[ccst, "label"] = "ccst(pixel)"
    (tmp_path / "table.toml").write_text(find_table("gperxan-table-2").read_text())
    lines = {line.row.printed: line for line in reproductions(tmp_path, runs)[0].lines}
    assert lines["CCST"].unlike == ["it runs as ccst(pixel)"]
    assert not lines["FedAvg"].unlike


def test_a_table_from_the_command_line(tmp_path):
    """It is tested with a dry run, a real run of one cell, and its comparison."""
    file = small_table(tmp_path)
    words = ["sweep", str(file), "--output", str(tmp_path / "out")]
    shown = CliRunner().invoke(app, [*words, "--dry-run"])
    assert shown.exit_code == 0, shown.output
    assert "12 cells, 0 finished" in shown.output
    assert "4 rows are not measured" in " ".join(shown.output.split())
    assert not (tmp_path / "out").exists()
    planned = plan_table(file, Choice(["fedavg"], ["rot75"], [0]), (), str(tmp_path / "out" / "small"))
    run_small(planned[0].cells[0].experiment)
    options = ["--methods", "fedavg", "--targets", "rot75", "--seeds", "0"]
    again = CliRunner().invoke(app, [*words, *options])
    assert again.exit_code == 0, again.output
    assert "1 cell, 1 finished" in again.output
    shown = CliRunner().invoke(app, ["compare", str(tmp_path / "out" / "small")])
    assert shown.exit_code == 0, shown.output
    assert "Small - other: best source validation" in " ".join(shown.output.split())
    assert (tmp_path / "out" / "small" / "comparison.csv").is_file()
    refused = CliRunner().invoke(app, [*words, "--grid", "train.lr=0.1,0.2"])
    assert isinstance(refused.exception, UserError)
