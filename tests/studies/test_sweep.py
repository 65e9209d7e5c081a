"""A sweep's plan: its cells, what is refused before anything starts, and the steps that they will take."""

import json
import os
import signal
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.runs.plan import Plan, resolve
from fedsim.runs.work import planned_work
from fedsim.settings.experiment import read_experiment
from fedsim.studies import Axes, budget
from fedsim.studies.axes import check_axes, grid_points, split_values
from fedsim.studies.estimate import Estimate, guessed_rates
from fedsim.studies.grid import small_table
from fedsim.studies.loop import run_cells
from fedsim.studies.plan import Cell, plan_cells
from fedsim.studies.pool import CellProcess
from fedsim.studies.tables import caption
from fedsim.studies.view import task_of

SMALL = ("data.fraction=0.1", 'data.domains=["rot0", "rot15", "rot30"]', "train.rounds=2")
SET = [part for word in SMALL for part in ("--set", word)]


def planned(methods="fedavg", targets="rot0", grid=(), more=()):
    return plan_cells("digits", Axes(methods.split(), targets.split(), [0], grid), [*SMALL, *more], "")


def test_all_refused_methods_are_named_at_once():
    """A sweep of all rows on a table was refused 18 times, once for each row that needs images."""
    axes = Axes(["fedavg", "ccst", "mixup", "cutmix", "jigen"], ["hungary"], [0], ())
    with pytest.raises(UserError, match=r"ccst: .* takes any tensors; refused, too: cutmix, jigen; leave them out of"):
        plan_cells("hospitals", axes, [], "")
    with pytest.raises(UserError, match=r"no part 'proximal'.*; sweep fedavg without this --grid into the same --out"):
        planned("fedavg fedprox", grid=["method.proximal.mu=0.1,1"])
    with pytest.raises(UserError, match=r"train\.lr") as both:
        planned("fedavg fedprox", more=["train.lr=-1"])
    assert "refused, too" not in str(both.value)


def test_grid_is_a_product_and_values_may_hold_commas():
    assert split_values('0, 0.25 ,["a","b"],"x,y"') == ["0", "0.25", '["a","b"]', '"x,y"']
    assert grid_points(["a=1,2", "b=x"]) == [("a=1", "b=x"), ("a=2", "b=x")]
    assert grid_points([]) == [()]
    assert grid_points(["a+b=1+x,2+y", "c=3+4"]) == [("a=1", "b=x", "c=3+4"), ("a=2", "b=y", "c=3+4")]
    with pytest.raises(UserError, match="2 has 1 values for 2 settings"):
        grid_points(["a+b=1+x,2"])
    with pytest.raises(UserError, match="b is given twice"):
        check_axes(Axes(["fedavg"], ["rot0"], [0], ["a+b=1+2,2+3", "b=2,3"]), [])
    # 1, 2 and 4 epochs a round with 4, 2 and 1 rounds: as many images in as many steps.
    grid = ["train.epochs+train.rounds=1+4,2+2,4+1"]
    cells = plan_cells("digits", Axes(["fedavg"], ["rot0"], [0], grid), SMALL[:2], "")
    work = [planned_work(resolve(cell.experiment), [72, 90])[1] for cell in cells]
    assert {(r * each.images, r * each.steps) for r, each in zip((4, 2, 1), work)} == {(648.0, 16.0)}


def test_cells_are_planned_once_each(tmp_path, monkeypatch):
    """Repeated values count once, labels come from the grid, and each network is tried once."""
    tried = []
    monkeypatch.setattr(Plan, "refuse_misfits", lambda plan: tried.append(plan.experiment.method_name))
    cells = planned("fedavg fedavg fedbn", "rot0 rot30", ["train.lr=0.1,0.2"], [f"run.output={tmp_path}"])
    planned_titles = product(("fedavg", "fedbn"), (0.1, 0.2), ("rot0", "rot30"))
    assert [cell.title for cell in cells] == [f"{m}@train.lr={lr} → {t} (seed 0)" for m, lr, t in planned_titles]
    assert (tried, list(tmp_path.iterdir())) == (["fedavg", "fedbn"], [])
    with pytest.raises(UserError, match="two values share the folder"):
        planned(grid=["data.root=/a/b,/a_b"])
    grid = planned("fedprox", grid=["method.proximal.mu=0.1,0.2"])  # the first is the row's own value
    assert [cell.folder.parts[-3] for cell in grid] == ["fedprox", "fedprox@proximal.mu=0.2"]
    # `--set run.label=x` is in the name of every cell's folder, before the grid's values.
    cells = planned(grid=["train.lr=0.1,0.2"], more=["run.label=x"])
    assert [cell.experiment.run.label for cell in cells] == ["x,train.lr=0.1", "x,train.lr=0.2"]
    cells = planned(grid=["train.epochs+train.lr=1+0.4,2+0.2"])
    labels = [f"fedavg@train.epochs={epochs},train.lr={lr}" for epochs, lr in ((1, 0.4), (2, 0.2))]
    assert [cell.folder.parts[-3] for cell in cells] == labels


def test_a_combination_or_network_that_is_refused_is_one_failed_cell():
    cells = planned("fedavg copa csac+feddg-ga", "rot0 rot15", more=["model.backbone=digits-cnn"])
    assert [cell.state for cell in cells] == ["waiting"] * 2 + ["failed"] * 4
    with pytest.raises(UserError) as refusal:
        resolve(cells[2].experiment).build_net()
    assert {cell.reason for cell in cells[2:4]} == {str(refusal.value)}
    assert all("use one of the two" in cell.reason for cell in cells[4:])
    with pytest.raises(UserError, match="fedaavg"):
        planned("fedavg fedaavg")


@pytest.mark.parametrize("values", ["0.1,-1,-2", "-1,-2,0.1"])
def test_a_refused_value_of_a_combination_is_a_failed_cell_of_its_own(values, tmp_path):
    """0.1 is the row's own value, whose folder a refused one does not take."""
    grid = [f"method.proximal.mu={values}"]
    cells = planned("fedprox+fedadam", "rot0", grid, [f"run.output={tmp_path}"])
    by_value = {cell.experiment.method["proximal"]["mu"]: cell for cell in cells}
    assert {value: cell.state for value, cell in by_value.items()} == {0.1: "waiting", -1: "failed", -2: "failed"}
    assert by_value[0.1].folder.parts[-3] == "fedprox+fedadam"


def test_a_sweep_from_end_to_end(tmp_path, in_this_process):
    """Cells that cannot run, or fail, are named with their reason at the end; the others run; the exit code is 1."""
    words = ["sweep", "digits", "--targets", "rot0,rot15", "--grid", "train.lr=0.05,1e30", "--jobs", "1", *SET]
    words += ["--output", str(tmp_path), "--methods", ""]  # an empty option is not given
    assert "no finished rounds" in CliRunner().invoke(app, [*words, "--dry-run"]).output
    assert not list(tmp_path.iterdir())
    first = planned(grid=["train.lr=0.05,1e30"], more=[f"run.output={tmp_path}"])[0]
    first.folder.mkdir(parents=True)
    (first.folder / "experiment.toml").write_text(first.experiment.replace(train={"momentum": 0.1}).toml())
    (first.folder / "environment.json").write_text('{"format": 1}')
    (first.folder / "summary.csv").touch()  # results of another experiment
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert "4 cells, 0 finished, 1 cannot run, 3 to run" in result.output
    said = " ".join(result.output.split())
    assert "failed: fedavg@train.lr=0.05 → rot0 (seed 0): " in said
    assert "holds a run with other settings (train.momentum)" in said
    assert "failed: fedavg@train.lr=1e30 → rot15 (seed 0): " in said
    assert "1 of 4 cells finished, 3 failed" in said
    assert f"next: fedsim compare {tmp_path}/digits; fedsim report {tmp_path}/digits" in said
    results = pd.read_csv(tmp_path / "digits" / "results.csv")
    assert results[["label", "target"]].to_numpy().tolist() == [["fedavg", "rot15"]]
    words += ["--targets", "rot15", "--set", "run.personalised=true"]
    shown = " ".join(CliRunner().invoke(app, [*words, "--dry-run"]).output.split())
    assert "2 cells, 1 finished, 1 to run, 1 at a time" in shown
    assert " s from finished rounds" in shown
    assert "run.personalised changed too late for what it records" in shown


@pytest.mark.parametrize(("words", "said"), [
    (["--grid", "run.seed=1,2"], "--grid run.seed=1,2: a sweep takes this from --seeds; use --seeds 1,2"),
    (["--set", "run.target=rot0"], "--set run.target=rot0: a sweep takes this from --targets"),
    (["--grid", "train.lr=0.1,0.2,1e-1"], "0.1 and 1e-1 are the same value; give it once"),
    (["--grid", "run.label=a,b"], "a sweep has only one value of run.label"), (["--cores-per-cell", "9999"], "cores"),
    (["--grid", "train.lr=0.1", "--grid", "train.lr=0.2"], "train.lr is given twice"),
    (["--grid", "method.proximal.mu=0.1,0.2", "--set", "method.proximal={mu=0.3}"], "method.proximal one value"),
    (["--set", "parts.proximal.mu=0.1", "--set", "method.proximal.mu=3"], "gives method.proximal.mu too"),
    (["--grid", "preset=a,b", "--preset", "a"], "preset"), (["--callback", "nowhere.at:All"], "nowhere"),
    (["--ray", "local", "--set", "run.runtime=ray"], "run inline"),
])  # fmt: skip
def test_what_a_sweep_would_ignore_or_cannot_do_is_refused_before_anything_starts(words, said, tmp_path):
    result = CliRunner().invoke(app, ["sweep", "digits", "--output", str(tmp_path / "out"), *words])
    assert isinstance(result.exception, UserError)  # one line and exit code 2
    assert said in str(result.exception)
    assert not (tmp_path / "out").exists()


def cell(method, preset):
    words = [f"method.name={method}", "run.target=sketch"]
    return Cell(resolve(read_experiment("pacs", words, preset)).experiment, Path("nowhere"))


def test_a_method_without_finished_rounds_is_counted_by_the_cost_of_its_step():
    """2 s a round of FedAvg and 6 s of FedSAM, whose steps cost 1 and 2, give (2 / 1 + 6 / 2) / 2 = 2.5 s per cost."""
    cells = [cell(name, "fedig") for name in ("fedavg", "fedsam", "csac", "fedbn")]
    rates, costs = {"fedavg": 2.0, "fedsam": 6.0}, {"fedavg": 1.0, "fedsam": 2.0, "csac": 1.5}
    guessed, words = guessed_rates(cells, rates, costs)
    assert guessed == pytest.approx({"csac": 3.75, "fedbn": 4.0})
    assert words[0] == "csac is not measured: 3.75 s by the cost of its step"
    assert words[1] == "fedbn is not measured: it is counted like the mean of fedavg, fedsam"
    assert guessed_rates(cells[2:3], {"fedavg": 2.0}, {"csac": 1.5})[0] == {"csac": 2.0}
    cells[2].state = "failed"
    assert guessed_rates(cells[:3], rates, {}) == ({}, [])
    assert guessed_rates(cells, {}, costs) == ({}, [])


class Witness:
    def on_start(self, experiment, folder):
        self.file = folder / "witness.json"
        self.seen = [os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "OF_THE_SWEEP")]
        self.seen += [signal.getsignal(signal.SIGINT) == signal.SIG_IGN]

    def on_round(self, row, clients):
        self.seen.append(row["round"])

    def on_end(self, summary):
        self.file.write_text(json.dumps(self.seen))


def test_local_cells_have_their_device_and_callbacks(tmp_path, monkeypatch):
    """A worker sees the sweep's variables, its GPU and no Ctrl-C; callbacks are called, and a wrong one is named."""
    more = [f"run.output={tmp_path}", "run.device=cpu", "run.callbacks=['test_sweep:Witness']"]
    cells = planned(targets="rot0 rot15", more=more)
    (cells[1].folder).parent.mkdir(parents=True)
    cells[1].folder.write_text("a file where the run's folder should be")
    monkeypatch.setenv("OF_THE_SWEEP", "now")
    run_cells(cells, cells, [budget.Reservation(1, ("7",))], budget.Budget(), blind=False)
    assert json.loads((cells[0].folder / "witness.json").read_text()) == ["7", "now", True, 0, 1, 2]
    assert (cells[0].state, cells[1].state) == ("finished", "failed")
    assert "File exists" in cells[1].reason
    causes = {-9: "SIGKILL, out of memory?", -15: "SIGTERM", 3: "exit code 3"}
    assert {code: CellProcess.cause(code) for code in causes} == causes


STARTS = {
    "fedsim.common.workers.Worker.give": ["sweep", "pacs", "--targets", "photo"],  # the start of a process for a cell
    "fedsim.studies.pool.CellProcess.start": ["sweep", "tables/csac-table-3", "--targets", "M0"],
    "fedsim.runs.plan.build_net": ["run", "pacs", "--method", "fedavg", "--target", "sketch"],  # perhaps a download
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


def test_a_dry_run_says_the_hours_of_a_cell_and_of_all():
    """Two rows with 4 cells of 3 h and 1 of 8 h: 20 h for 5 cells, of which two run at a time."""
    rows = [Estimate(4 * 3 * 3600.0, "steps", 4), Estimate(8 * 3600.0, "steps", 1), Estimate(0.0, "")]
    assert caption(rows, 2) == (
        "5 cells to run, 4.0 hours each: 20.0 hours one cell at a time, 10.0 with 2, at the speed of what was measured "
        "(steps)"
    )
    assert caption([*rows, Estimate(None, "not measured")], 2).endswith("(steps), and 1 row is not measured")


def test_a_sweep_ends_with_the_means_of_the_selected_rounds(tmp_path):
    """A half and a quarter are 37.5 % in the mean; a run with none, or with nan, counts among the cells alone."""
    cells = planned("fedavg fedprox", "rot0 rot15")
    results = (("a", "0.5"), ("a", "0.25"), ("a", "nan"), ("b", ""))
    for number, (cell, (method, text)) in enumerate(zip(cells, results, strict=True)):
        cell.folder = tmp_path / method / f"rot{number}" / "seed0"
        cell.folder.mkdir(parents=True)
        head = "last_target_accuracy,best_validation_target_loss,best_validation_target_accuracy"
        (cell.folder / "summary.csv").write_text(f"{head}\n0.9,0.8,{text}\n")  # another measure is no accuracy
    shown = small_table("digits", task_of(cells[0]), cells)
    assert [[cell.text for cell in row.full_cells] for row in shown.rows] == [["a", "3", "37.5 %"], ["b", "1", ""]]
    assert shown.title == "digits: accuracy on the unseen domains, best source validation"
