"""The space of a search: its draws, the arithmetic of scores and ranks, and what is refused."""

import csv
import math
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.settings.experiment import read_experiment
from fedsim.studies.plan import Cell
from fedsim.studies.reports import nested
from fedsim.studies.scores import mean_score, ranking, validation_of
from fedsim.studies.search import (
    PlannedSearch,
    Search,
    Trial,
    caveats,
    plan_search,
    search_text,
    show_result,
    trial_rows,
    write_trials,
)
from fedsim.studies.space import first_alike, points, read_space

RATE = "train.lr=log:1e-4:1e-1"


def values(word, *shares):
    return [read_space([word])[0].value(share) for share in shares]


def test_values_by_hand():
    """A log range is uniform in the exponent, both ends of an int range are reached, and numbers have four digits."""
    assert values("train.lr=log:1e-4:1e-2", 0.0, 0.25, 0.5) == ["0.0001", "0.0003162", "0.001"]
    assert values("train.lr=uniform:0.1:0.3", 0.0, 0.5, 1 / 3) == ["0.1", "0.2", "0.1667"]
    assert values("train.batch_size=int:2:4", 0.0, 0.33, 0.34, 0.99) == ["2", "2", "3", "4"]
    assert values('method.add=["a","b"],[]', 0.0, 0.49, 0.5) == ['["a","b"]', '["a","b"]', "[]"]
    assert values("train.lr=uniform:0.123456:0.123457", 0.5) == ["0.123457"]  # rounding does not leave the range


def test_a_draw_depends_on_the_seed_the_settings_own_name_and_the_trial_alone():
    """More trials, more settings and their order change no draw; two settings with the same range have their own."""
    words = [RATE, "train.weight_decay=log:1e-4:1e-1"]
    drawn = [points(read_space(words), 50, seed) for seed in (0, 1)]
    assert len({text for own in drawn for point in own[1:] for text in point.values()}) > 150
    for seed, many in enumerate(drawn):
        assert many == points(read_space(words[::-1]), 50, seed)
        few = points(read_space(words[:1]), 20, seed)
        assert [point.get("train.lr") for point in many[:20]] == [point.get("train.lr") for point in few]
        assert few[0] == many[0] == {}


def test_scores_and_ranks_by_hand():
    """A missing cell leaves no score; equal scores share a rank, and the first trial is listed first."""
    assert [mean_score(values) for values in ([0.5, 0.75], [0.5, "failed"], [])] == [0.625, None, None]
    assert ranking({0: 0.5, 1: None, 2: 0.75, 3: 0.5 + 1e-12, 4: 0.25}) == {2: 1, 0: 2, 3: 2, 4: 4}
    assert ranking({0: None}) == {}
    # Equal values are one trial, also where the file's own value is written in another way.
    drawn = [{}, {"train.lr": "5e-2"}, {"train.lr": "0.1"}, {"train.lr": "0.10"}]
    assert first_alike(drawn, {"train.lr": 0.05}) == [0, 0, 2, 2]
    expected = {"train": {"lr": 0.1}, "method": {"guiding_head": {"weight": 1}}}
    assert nested({"train.lr": 0.1, "method.guiding_head.weight": 1}) == expected


@pytest.mark.parametrize(("space", "said"), [
    (["train.lr"], "is not of the form"), (["train.lr=log:0:1"], "must begin above 0"),
    (["train.lr=uniform:1:1"], "the range is empty"),
    (["train.lr=uniform:0:inf"], "must be finite"), (["train.batch_size=int:2:4.5"], "whole numbers"),
    (["train.lr=loguniform:1e-4:1"], "this is one value"), (["train.lr=0.1,,0.2"], "a value is empty"),
    ([RATE, "train.lr=0.1,0.2"], "train.lr is given twice"),
    (["run.target=rot0,rot15"], "use --targets"), (["method.name=fedavg,csac"], "use --method"),
    (["run.select_on=aggregated,local"], "run.select_on is not searched"),
    (["data.fraction=uniform:0.1:1"], "[data] says what the task is"),
    (["train.evaluate_every=int:1:3"], "the validation by which the trials are scored"),
    (["lr=0.1,0.2"], "whole name"),
])  # fmt: skip
def test_a_space_is_refused_by_itself(space, said):
    with pytest.raises(UserError, match=rf"\A.*{re.escape(said)}.*\Z"):
        read_space(space)


SMALL = ("data.fraction=0.1", 'data.domains=["rot0", "rot15", "rot30"]', "train.rounds=1", "run.device=cpu")


def plan(*space, output="/nowhere", method="fedavg", trials=2, targets=("rot0",), more=()):
    search = Search(method, targets, [0], space, trials)
    return plan_search("digits", search, [*SMALL, f"run.output={output}", *more], "")


@pytest.mark.parametrize(("space", "said"), [
    ("train.lrr=0.1,0.2", "did you mean 'lr'"), ("train.lr=uniform:-1:1", "greater than 0"),
    ("data.augment=none,nope", "data.augment: unknown 'nope'"),
    ("method.guiding_head.weight=0.1,0.2", "has no part 'guiding_head'"),
])  # fmt: skip
def test_what_the_method_or_its_settings_refuse(space, said):
    """Before anything starts, and even when no draw would leave the bounds."""
    with pytest.raises(UserError) as refused:
        plan(space)
    assert str(refused.value).startswith(f"--space {space}: ")
    assert said in str(refused.value)
    words = {"train.lr=0.1": "--set gives train.lr one value too", "run.target=rot0": "use --targets rot0"}
    for word, twice in words.items():
        with pytest.raises(UserError, match=twice):
            plan(RATE, more=[word])


def test_trial_0_is_the_file_itself_and_later_trials_are_added(tmp_path):
    space = (RATE, "method.guiding_head.weight=0.1,0.25")
    few, many = (
        plan(*space, method="gperxan", output=tmp_path, targets=["rot0", "rot15"], trials=trials) for trials in (2, 3)
    )
    folders = [cell.folder.parts[-3:] for cell in few.trials[0].cells]
    assert folders == [("gperxan", target, "seed0") for target in ("rot0", "rot15")]
    assert few.file_values == {"method.guiding_head.weight": 0.5, "train.lr": 0.05}
    assert [cell.folder for cell in many.cells[:4]] == [cell.folder for cell in few.cells]
    assert len(many.cells) == 6
    drawn = few.trials[1]
    weight, rate = (drawn.values[key] for key in ("method.guiding_head.weight", "train.lr"))
    assert drawn.cells[0].experiment.train.lr == float(rate)
    assert drawn.cells[0].folder.parts[-3] == f"gperxan@guiding_head.weight={weight},train.lr={rate}"
    assert not list(tmp_path.iterdir())
    two = plan("train.momentum=0.9,0.5", trials=8)  # one of which is the file's own
    assert len(two.cells) == 2
    assert {row["repeats"] for row in trial_rows(two)} > {0, None}


def recorded(folder: Path, validation, **columns) -> Cell:
    """A finished cell with these columns in its records; the unseen domain is best in the first round."""
    rounds = {"round": [0, 1, 2, 3], "target_accuracy": [0.1, 0.99, 0.2, 0.2], "failed": [0, 0, 0, 0]}
    folder.mkdir(parents=True)
    own = rounds | {"mean_validation_accuracy": validation} | columns
    pd.DataFrame(own).to_csv(folder / "rounds.csv", index=False)
    return Cell(read_experiment("digits", ["run.target=rot0"]), folder, "finished")


def test_a_score_is_the_validation_of_the_selected_round(tmp_path):
    """The best round from 1 on, and not the one that is best on the unseen domain, whose values change nothing."""
    good = recorded(tmp_path / "a", [0.9, 0.25, 0.5, 0.375])
    hidden = recorded(tmp_path / "b", [0.9, 0.25, 0.5, 0.375], target_accuracy=[math.nan] * 4)
    assert validation_of(good) == validation_of(hidden) == 0.5
    nan = recorded(tmp_path / "c", [math.nan] * 4)
    # the mean over the other clients could be greater without a better model
    lost = recorded(tmp_path / "d", [0.1, 0.2, 0.3, 0.9], failed=[0, 0, 0, 1])
    failed, waiting = (Cell(good.experiment, tmp_path / state, state) for state in ("failed", "waiting"))
    for reason, cell in {"diverged": nan, "a client failed": lost, "failed": failed, "not run": waiting}.items():
        assert validation_of(cell) == reason
        trial = Trial(1, {}, 1, [good, cell], [validation_of(good), validation_of(cell)])
        assert (trial.score, trial.outcome) == (None, reason)
    assert Trial(1, {}, 1, [waiting, failed], ["not run", "failed"]).outcome == "failed"


def searched(output: Path, *measured, targets=("rot0",), seeds=(0,), seed=0) -> PlannedSearch:
    found = [read_experiment("digits", [f"run.target={name}", f"run.output={output}"]) for name in targets]
    cells = [Cell(experiment, output / experiment.run.target) for experiment in found]
    knobs = read_space([RATE])
    drawn = points(knobs, len(measured), seed)
    trials = [Trial(number, drawn[number], number, cells, list(own)) for number, own in enumerate(measured)]
    search = Search("fedavg", targets, seeds, [RATE], len(measured), seed)
    return PlannedSearch("digits", search, knobs, {"train.lr": 0.05}, trials, [f"run.output={output}"], "")


def test_the_best_trial_is_printed_in_words_that_can_be_pasted(tmp_path, capsys):
    """A TOML snippet, --set words, and the sweep that runs it with new seeds besides the search's own cells."""
    found = searched(tmp_path, [0.5], [0.75], ["failed"], [0.25], seeds=[2])
    show_result(found)
    shown, rate = capsys.readouterr().out, found.trials[1].values["train.lr"]
    for words in (
        "best: trial 1, 75.0 %; the file's own values: 50.0 %", f"[train]\nlr = {rate}\n", f"--set train.lr={rate}\n",
        "With one seed, the differences between trials may be noise.", "--methods fedavg --targets rot0 --seeds 3,4,5 ",
    ):  # fmt: skip
        assert words in shown
    assert shown.rstrip().endswith(f"--output {tmp_path} --grid train.lr={rate}")
    lines = [line for line in shown.splitlines() if "│" in line]
    assert [line.split("│")[2].strip() for line in lines] == ["1", "0 (file)", "3", "2"]
    assert "failed" in lines[-1]
    show_result(searched(tmp_path, [0.75], [0.75], [0.5]))
    shown = capsys.readouterr().out
    assert "best: trial 0, 75.0 %\n" in shown
    assert "nothing is to be changed" in shown
    show_result(searched(tmp_path, ["failed"], ["diverged"]))
    assert "No trial has a score" in capsys.readouterr().out
    several = caveats(searched(tmp_path, [0.5] * 4, [0.5] * 4, targets=["rot0", "rot15"], seeds=[0, 1]))
    assert [line.split()[0] for line in several] == ["One", "The"]


def test_search_csv_has_all_trials_and_keeps_other_searches(tmp_path):
    """A continued search replaces its own rows; another space, method or setting is another search."""
    write_trials([searched(tmp_path, [0.5], ["failed"])])
    file = tmp_path / "digits" / "search.csv"
    write_trials([searched(tmp_path, [0.5], ["failed"], [0.75])])
    table = pd.read_csv(file).fillna({"rank": 0, "score": 0})
    assert table[["trial", "outcome", "rank", "score"]].to_numpy().tolist() == [
        [0, "scored", 2, 0.5], [1, "failed", 0, 0], [2, "scored", 1, 0.75],
    ]  # fmt: skip
    assert set(table["scored_by"]) == {"mean_validation_accuracy"}
    assert not [name for name in table if "target" in name]
    write_trials([searched(tmp_path, [0.5], [0.25], seed=1)])
    assert len(pd.read_csv(file)) == 5
    planned, names = searched(tmp_path, [0.5]), []
    for own, preset in (([], ""), (["train.rounds=2", "data.fraction=0.5", "train.rounds=3"], ""), (["a=1"], "csac")):
        planned.overrides, planned.preset = [f"run.output={tmp_path}", *own], preset
        names.append(trial_rows(planned)[0]["search"])
    assert names[0].endswith("; search seed 0")
    assert names[1:] == [f"{names[0]}; data.fraction=0.5; train.rounds=3", f"{names[0]}; preset=csac; a=1"]
    planned.search = replace(planned.search, pruner="median")  # which takes scores away
    assert search_text(planned) == f"{names[-1]}; pruner median"


def test_several_searches_are_written_at_once(tmp_path, monkeypatch):
    """A writer of one search after the other could take turns with a second process, and mix their order."""
    first, second = searched(tmp_path, [0.5]), searched(tmp_path, [0.75], seed=1)
    write_trials([second])
    texts = []
    monkeypatch.setattr("fedsim.studies.search.atomic_write", lambda file, text: texts.append(text))
    write_trials([first, second])
    (text,) = texts
    assert [row["score"] for row in csv.DictReader(text.splitlines())] == ["0.5", "0.75"]


def test_a_search_from_end_to_end(tmp_path, in_this_process):
    words = ["search", "digits", "--targets", "rot0", "--trials", "2", "--jobs", "1", "--output", str(tmp_path)]
    words += ["--space", RATE, *(part for word in SMALL for part in ("--set", word))]
    assert "not run" in CliRunner().invoke(app, [*words, "--dry-run"]).output
    assert not list(tmp_path.iterdir())
    first = CliRunner().invoke(app, words)
    assert first.exit_code == 0, first.output
    assert "at the last round" not in first.output  # nothing of the unseen domain
    table = pd.read_csv(tmp_path / "digits" / "search.csv")
    for trial, folder in zip(table.itertuples(), sorted((tmp_path / "digits").glob("fedavg*"))):
        rounds = pd.read_csv(folder / "rot0" / "seed0" / "rounds.csv")
        assert trial.score == rounds["mean_validation_accuracy"][1]
    again = CliRunner().invoke(app, words)
    assert "2 cells, 2 finished, 0 to run" in again.output
    assert again.output.splitlines()[2:] == first.stdout.splitlines()[2:]
