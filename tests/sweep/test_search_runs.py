"""A search: its trials and their cells, what it refuses, how a trial is scored, and what is shown and written."""

import math
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.settings.experiment import read_experiment
from fedsim.sweep.cell_process import run_cell
from fedsim.sweep.plan import Cell
from fedsim.sweep.search import points, read_space
from fedsim.sweep.search_plan import PlannedSearch, Search, Trial, plan_search, validation_of
from fedsim.sweep.search_texts import caveats, show_result, trial_rows, write_trials
from fedsim.sweep.view import SweepView

SMALL = ("data.fraction=0.1", 'data.domains=["rot0", "rot15", "rot30"]', "train.rounds=1", "run.device=cpu")
RATE = "train.lr=log:1e-4:1e-1"


def plan(*space, output="/nowhere", method="fedavg", trials=2, targets=("rot0",), more=()):
    """A planned search on small digits, of which nothing runs."""
    search = Search(method, targets, [0], space, trials)
    return plan_search("digits", search, [*SMALL, f"run.output={output}", *more], "")


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ("train.lrr=0.1,0.2", "did you mean 'lr'"),
        ("train.lr=uniform:-1:1", "greater than 0"),
        ("train.momentum=uniform:0:1", "less than 1"),
        ("train.batch_size=uniform:2:9", "valid integer"),
        ("data.augment=none,nope", "data.augment: unknown 'nope'"),
        ("method.guiding_head.weight=0.1,0.2", "has no part 'guiding_head'"),
        ("parts.guiding_head.weight=0.1,0.2", "has no part 'guiding_head'"),
    ],
)
def test_what_the_method_or_its_settings_refuse(space, said):
    """Before anything starts, and even when no draw would leave the bounds."""
    with pytest.raises(UserError) as refused:
        plan(space)
    assert str(refused.value).startswith(f"--space {space}: ")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("train.lr=0.1", "--set gives train.lr one value too"),
        ("run.target=rot0", "use --targets rot0"),
        ("method.name=csac", "use --method csac"),
        ("train={lr=0.1}", "--set gives train one value too"),
    ],
)
def test_nothing_is_given_twice(word, said):
    with pytest.raises(UserError, match=said):
        plan(RATE, more=[word])


def test_a_part_is_not_given_as_a_table_beside_its_searched_field():
    with pytest.raises(UserError, match=r"--set gives method\.proximal one value too"):
        plan("method.proximal.mu=0.1,0.2", method="fedprox", more=["method.proximal={mu=0.3}"])


def test_trial_0_is_the_file_itself_and_later_trials_are_added(tmp_path):
    """Its cells are those of a plain run; a greater number of trials keeps the cells of the first ones."""
    weight = "method.guiding_head.weight=0.1,0.25"
    few = plan(RATE, weight, method="gperxan", output=tmp_path, targets=["rot0", "rot15"])
    many = plan(RATE, weight, method="gperxan", output=tmp_path, targets=["rot0", "rot15"], trials=3)
    assert [cell.folder.parts[-3:] for cell in few.trials[0].cells] == [
        ("gperxan", target, "seed0") for target in ("rot0", "rot15")
    ]
    assert few.own == {"method.guiding_head.weight": 0.5, "train.lr": 0.05}
    assert [cell.folder for cell in many.cells[:4]] == [cell.folder for cell in few.cells]
    assert len(many.cells) == 6
    drawn = few.trials[1]
    assert drawn.cells[0].experiment.train.lr == float(drawn.values["train.lr"])
    assert drawn.cells[0].folder.parts[-3] == (
        f"gperxan@guiding_head.weight={drawn.values['method.guiding_head.weight']},train.lr={drawn.values['train.lr']}"
    )
    assert not list(tmp_path.iterdir())


def recorded(folder: Path, **columns) -> Cell:
    """A finished cell with these columns in its records; the unseen domain is best in the first round."""
    rounds = {"round": [0, 1, 2, 3], "target_accuracy": [0.1, 0.99, 0.2, 0.2], "failed": [0, 0, 0, 0]}
    folder.mkdir(parents=True)
    pd.DataFrame(rounds | columns).to_csv(folder / "rounds.csv", index=False)
    return Cell(read_experiment("digits", ["run.target=rot0"]), folder, "finished")


def test_a_score_is_the_validation_of_the_selected_round(tmp_path):
    """The best round from 1 on, and not the one that is best on the unseen domain, whose values change nothing."""
    validation = [0.9, 0.25, 0.5, 0.375]
    assert validation_of(recorded(tmp_path / "a", mean_validation_accuracy=validation)) == 0.5
    hidden = recorded(tmp_path / "b", mean_validation_accuracy=validation, target_accuracy=[math.nan] * 4)
    assert validation_of(hidden) == 0.5


def test_a_failed_or_diverged_cell_has_no_score(tmp_path):
    """Nor has one in which a client failed: the mean over the others could be greater without a better model."""
    good = recorded(tmp_path / "a", mean_validation_accuracy=[0.1, 0.2, 0.3, 0.4])
    nan = recorded(tmp_path / "b", mean_validation_accuracy=[math.nan] * 4)
    lost = recorded(tmp_path / "c", mean_validation_accuracy=[0.1, 0.2, 0.3, 0.9], failed=[0, 0, 0, 1])
    failed, waiting = (Cell(good.experiment, tmp_path / state, state) for state in ("failed", "waiting"))
    reasons = {"diverged": nan, "a client failed": lost, "failed": failed, "not run": waiting}
    for reason, cell in reasons.items():
        assert validation_of(cell) == reason
        trial = Trial(1, {}, 1, [good, cell], [validation_of(good), validation_of(cell)])
        assert (trial.score, trial.outcome) == (None, reason)
    assert Trial(1, {}, 1, [waiting, failed], ["not run", "failed"]).outcome == "failed"


def searched(output: Path, *measured, targets=("rot0",), seeds=(0,), seed=0) -> PlannedSearch:
    """A search with invented validations: one list for each trial."""
    found = [read_experiment("digits", [f"run.target={name}", f"run.output={output}"]) for name in targets]
    cells = [Cell(experiment, output / experiment.run.target) for experiment in found]
    knobs = read_space([RATE])
    drawn = points(knobs, len(measured), seed)
    trials = [Trial(number, drawn[number], number, cells, list(own)) for number, own in enumerate(measured)]
    search = Search("fedavg", targets, seeds, [RATE], len(measured), seed)
    return PlannedSearch("digits", search, knobs, {"train.lr": 0.05}, trials, [f"run.output={output}"], "")


def test_the_best_trial_is_printed_in_words_that_can_be_pasted(tmp_path, capsys):
    """A TOML snippet, --set words, and the sweep that runs it with new seeds beside the search's own cells."""
    found = searched(tmp_path, [0.5], [0.75], ["failed"], [0.25], seeds=[2])
    show_result(found)
    shown, rate = capsys.readouterr().out, found.trials[1].values["train.lr"]
    assert "best: trial 1, 75.0 %; the file's own values: 50.0 %" in shown
    assert f"[train]\nlr = {rate}\n" in shown
    assert f"--set train.lr={rate}\n" in shown
    assert "With one seed, the differences between trials may be noise." in shown
    assert "--methods fedavg --targets rot0 --seeds 3,4,5 " in shown
    assert shown.rstrip().endswith(f"--output {tmp_path} --grid train.lr={rate}")
    lines = [line for line in shown.splitlines() if "│" in line]
    assert [line.split("│")[2].strip() for line in lines] == ["1", "0 (file)", "3", "2"]
    assert "failed" in lines[-1]


def test_the_file_itself_may_be_the_best(tmp_path, capsys):
    show_result(searched(tmp_path, [0.75], [0.75], [0.5]))
    shown = capsys.readouterr().out
    assert "best: trial 0, 75.0 %\n" in shown
    assert "nothing is to be changed" in shown
    show_result(searched(tmp_path, ["failed"], ["diverged"]))
    assert "No trial has a score" in capsys.readouterr().out


def test_the_ranking_says_what_it_rests_on(tmp_path):
    """Several targets share one setting; several seeds still favour the best of many."""
    one = caveats(searched(tmp_path, [0.5], [0.5]))
    several = caveats(searched(tmp_path, [0.5] * 4, [0.5] * 4, targets=["rot0", "rot15"], seeds=[0, 1]))
    assert [line.split()[0] for line in one] == ["With", "The"]
    assert [line.split()[0] for line in several] == ["One", "The"]


def test_search_csv_has_all_trials_and_keeps_other_searches(tmp_path):
    """A continued search replaces its own rows; those of another space or method stay."""
    write_trials(searched(tmp_path, [0.5], ["failed"]))
    file = tmp_path / "digits" / "search.csv"
    write_trials(searched(tmp_path, [0.5], ["failed"], [0.75]))
    table = pd.read_csv(file)
    assert list(table["trial"]) == [0, 1, 2]
    assert list(table["outcome"]) == ["scored", "failed", "scored"]
    assert table["rank"].fillna(0).tolist() == [2, 0, 1]
    assert table["score"].fillna(0).tolist() == [0.5, 0, 0.75]
    assert set(table["scored_by"]) == {"mean_validation_accuracy"}
    assert not [name for name in table if "target" in name]
    write_trials(searched(tmp_path, [0.5], [0.25], seed=1))
    assert len(pd.read_csv(file)) == 5


def test_searches_with_other_settings_are_other_searches(tmp_path):
    """Their scores do not compare, so that none replaces the rows of another; a name without settings is as before."""
    planned = searched(tmp_path, [0.5])
    planned.overrides = [f"run.output={tmp_path}"]
    names = [trial_rows(planned)[0]["search"]]
    assert names[0].endswith("; search seed 0")
    planned.overrides = [f"run.output={tmp_path}", "train.rounds=2", "data.fraction=0.5", "train.rounds=3"]
    names.append(trial_rows(planned)[0]["search"])
    assert names[1] == f"{names[0]}; data.fraction=0.5; train.rounds=3"
    planned.preset = "csac"
    names.append(trial_rows(planned)[0]["search"])
    assert names[2] == f"{names[0]}; preset=csac; data.fraction=0.5; train.rounds=3"
    for name in range(3):
        planned.overrides, planned.preset = ([], ["train.rounds=3"], ["train.rounds=3"])[name], ("", "", "csac")[name]
        write_trials(planned)
        write_trials(planned)
    assert len(pd.read_csv(tmp_path / "digits" / "search.csv")) == 3


def test_repeated_values_are_one_cell():
    """Five trials over two values, one of which is the file's own, are two different trials."""
    found = plan("train.momentum=0.9,0.5", trials=5)
    assert len(found.cells) == 2
    assert {row["repeats"] for row in trial_rows(found)} > {0, None}


def test_the_live_view_of_a_search_is_blind(tmp_path):
    """It shows nothing of the unseen domain."""
    cell = Cell(read_experiment("digits", ["run.target=rot0"]), tmp_path / "fedavg" / "rot0" / "seed0")
    blind, open_ = SweepView([cell], 1, blind=True), SweepView([cell], 1)
    cell.hear("round", 1, 0.4321)
    assert "43.2" in open_._finished(cell)
    assert "43.2" not in blind._finished(cell)
    cell.begin()
    assert [str(column.header) for column in blind.render().renderables[2].columns][2] == ""


def in_this_process(cells, waiting, *_):
    """Runs the cells like a worker of the pool, without its start, which takes longer than the cells."""
    for cell in waiting:
        cell.begin()
        cell.hear(*run_cell(cell.experiment.toml(), lambda message, cell=cell: cell.hear(*message)))


def test_a_search_from_end_to_end(tmp_path, monkeypatch):
    """Two trials are run and ranked; the same command then starts nothing and prints the same."""
    monkeypatch.setattr("fedsim.sweep.run_cells", in_this_process)
    words = ["search", "digits", "--targets", "rot0", "--trials", "2", "--jobs", "1", "--output", str(tmp_path)]
    words += ["--space", RATE, *(part for word in SMALL for part in ("--set", word))]
    dry = CliRunner().invoke(app, [*words, "--dry-run"])
    assert "not run" in dry.output
    assert not list(tmp_path.iterdir())
    first = CliRunner().invoke(app, words)
    assert first.exit_code == 0, first.output
    table = pd.read_csv(tmp_path / "digits" / "search.csv")
    for trial, folder in zip(table.itertuples(), sorted((tmp_path / "digits").glob("fedavg*"))):
        rounds = pd.read_csv(folder / "rot0" / "seed0" / "rounds.csv")
        assert trial.score == rounds["mean_validation_accuracy"][1]
    again = CliRunner().invoke(app, words)
    assert "2 cells, 2 finished, 0 to run" in again.output
    assert again.output.splitlines()[2:] == first.output.splitlines()[2:]
