"""The papers' tables as experiments: all names in their files exist, and printed numbers are shown beside ours."""

import math
import re
import shutil

import pytest
from paper_runs import compared, finish, own_table, shipped, shown
from support import run_small
from typer.testing import CliRunner

from clients.terms.proximal import Proximal
from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.data import benchmark
from fedsim.methods.assembly import build_recipe
from fedsim.results import read_runs
from fedsim.results.published import domain_key, printed_numbers
from fedsim.settings.experiment import known_tables
from fedsim.sweep.reproduction import Line, Numbers, reproductions
from fedsim.sweep.reproduction_texts import csv_rows, render
from fedsim.sweep.tables import Choice, PaperRow, find_table, plan_table, row_experiment

SEEDS = {"fedig": 4, "csac": 5, "gperxan": 3, "fedsb": 3}  # the papers'
TABLES = [
    "csac-table-1", "csac-table-2", "csac-table-3", "csac-table-4", "csac-table-5", "fedig-a-table-1",
    "fedig-a-table-2", "fedig-a-table-3", "fedig-a-table-5", "fedig-a-table-6", "fedig-a-table-9", "fedsb",
    "gperxan-regulariser", "gperxan-table-2", "gperxan-table-3", "gperxan-table-4",
]  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_every_row_is_a_method_with_settings_that_exist(name):
    """Each row has another recipe, each target is a domain, and nothing printed is left out without a reason."""
    assert name in known_tables()
    assert len(shipped(name).seeds) == SEEDS[name.split("-")[0]]
    for block in shipped(name).blocks:
        experiments = [row_experiment(block, row) for row in block.rows]
        assert len({repr(build_recipe(experiment)) for experiment in experiments}) == len(block.rows)
        assert block.targets == ["all"] or set(block.targets) <= set(benchmark(experiments[0].data).domains)
        if block.published:
            printed = printed_numbers(block.published, experiments[0])
            named = [row.printed for row in block.rows] + [absent.printed for absent in block.absent]
            assert sorted(named) == sorted(set(printed["method"]))
        else:
            assert name not in ("fedsb", "gperxan-regulariser") or "not known here" in shipped(name).deviation
        assert all(absent.why for absent in block.absent)


def small_table(folder, rows='{ method = "fedavg", printed = "FedAvg" }', seeds="[0, 1]"):
    """A table of two blocks on digits, with one row that is a variant."""
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
    ({}, Choice(), ["train.roundz=1"], "train.roundz"),
    ({"rows": '{ metod = "fedavg" }'}, Choice(), [], "rows.0"),
    ({"rows": '{ method = "fedavg", settings = ["train.lr=1.0"] }'}, Choice(), [], "applies to a whole block"),
    ({"seeds": "[]"}, Choice(), [], "seeds"),
    ({"rows": '{ method = "fedafg" }'}, Choice(), [], "block 'digits' of the table: .*fedafg"),
])  # fmt: skip
def test_a_wrong_choice_or_file_is_one_line(tmp_path, file, choice, overrides, said):
    with pytest.raises(UserError, match=said):
        plan_table(small_table(tmp_path, **file), choice, overrides, str(tmp_path))


def test_names_of_tables_and_experiments(tmp_path):
    names = ("fedig-a-table-2", "tables/fedig-a-table-2.toml", "configs/tables/fedig-a-table-2", "fedig-a-table-2.toml")
    assert len({find_table(name) for name in names}) == 1
    assert find_table(names[0]).is_file()
    assert find_table("digits") is None
    assert find_table("/no/such/fedig-a-table-2.toml") is None  # then a missing experiment is reported
    assert find_table(str(small_table(tmp_path))) is not None
    for name, said in (("mine/tables/fedig-a-table-2.toml", "no table"), ("tables/fedig-a-table-22.toml", "did you")):
        with pytest.raises(UserError, match=said):
            find_table(name)


def test_inside_is_at_most_the_printed_deviation():
    line = Line(PaperRow(method="fedavg"), {"a": Numbers(0.823, 0.01, 3)})
    for printed, verdict in ((0.005, "inside"), (0.0049, "outside"), (math.nan, "")):
        line.theirs["a"] = Numbers(0.818, printed)
        assert (line.difference("a"), line.verdict("a")) == (pytest.approx(0.005), verdict)
    line.unlike = ["data.image_size is 64, there 224"]
    assert math.isnan(line.difference("a"))
    assert math.isnan(line.difference("b"))


def test_fedprox_has_the_mu_that_its_file_states():
    (block,) = [block for block in shipped("fedig-a-table-5").blocks if block.name == "pacs"]
    (stated,) = re.findall(r"FedProx's mu is ([\d.]+\d)", find_table("fedig-a-table-5").read_text())
    (row,) = [row for row in block.rows if row.method == "fedprox"]
    assert build_recipe(row_experiment(block, row)).terms == (Proximal(float(stated)),)


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


def test_a_table_from_the_command_line(tmp_path):
    """A dry run, a real run of one cell, and its comparison."""
    file = small_table(tmp_path)
    words = ["sweep", str(file), "--output", str(tmp_path / "out")]

    def said(*words):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        return " ".join(result.output.split())

    dry = said(*words, "--dry-run")
    assert "12 cells, 0 finished" in dry
    assert "4 rows are not measured" in dry
    assert not (tmp_path / "out").exists()
    planned = plan_table(file, Choice(["fedavg"], ["rot75"], [0]), (), str(tmp_path / "out" / "table"))
    run_small(planned[0].cells[0].experiment)
    assert "1 cell, 1 finished" in said(*words, "--methods", "fedavg", "--targets", "rot75", "--seeds", "0")
    assert "Own - other: best source validation" in said("compare", str(tmp_path / "out" / "table"))
    assert (tmp_path / "out" / "table" / "comparison.csv").is_file()
    assert isinstance(CliRunner().invoke(app, [*words, "--grid", "train.lr=0.1,0.2"]).exception, UserError)
