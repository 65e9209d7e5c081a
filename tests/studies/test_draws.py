"""Sweeps with draws: the protocol from end to end, the choice by hand, and Optuna's samplers."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.data.digits import Digits
from fedsim.records.selection import RULES
from fedsim.settings.experiment import read_experiment
from fedsim.studies.draws import tuned_row, tuned_table, write_tuned
from fedsim.studies.plan import Cell
from fedsim.studies.sampler import pruned_rounds, suggest
from fedsim.studies.search import PlannedSearch, Search, Trial
from fedsim.studies.space import read_space

SMALL = ("data.fraction=0.05", 'data.domains=["rot0", "rot30", "rot75"]', "train.rounds=1", "run.device=cpu")


def sweep(output, *more):
    """(what is printed of the choices, the rows of tuned.csv) of a small sweep with draws."""
    words = ["sweep", "digits", "--methods", "fedprox", "--targets", "rot75", "--jobs", "1", "--output", str(output)]
    words += [*(part for word in SMALL for part in ("--set", word)), *more]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    shown = result.stdout.replace(str(output), "")
    shown = shown[shown.index("best source validation", shown.index("cells")) :]
    return shown, pd.read_csv(output / "digits" / "tuned.csv")


def test_a_killed_sweep_ends_like_an_unbroken_one(tmp_path, in_this_process, monkeypatch):
    """The same table to the digit. Both trials have the same draws, of which the first is the file itself."""
    options = ("--draws", "2", "--trials", "2", "--select", "oracle")
    shown, table = sweep(tmp_path / "whole", *options)
    assert table[["seed", "draws", "scored"]].to_numpy().tolist() == [[0, 2, 2], [1, 2, 2]]
    assert len(list((tmp_path / "whole" / "digits").glob("fedprox*"))) == 2

    note = Cell.note

    def killed(cell, kind, *rest):
        note(cell, kind, *rest)
        if kind == "finished":
            raise KeyboardInterrupt

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(Cell, "note", killed)
            with pytest.raises(AssertionError):
                sweep(tmp_path / "killed", *options)
    again, same = sweep(tmp_path / "killed", *options)
    pd.testing.assert_frame_equal(same, table, check_exact=True)
    assert again == shown


def test_no_choice_depends_on_the_unseen_domain(tmp_path, in_this_process, monkeypatch):
    """With noise in place of its images all draws, scores and choices are the same; only its accuracies differ."""
    pytest.importorskip("optuna")
    monkeypatch.setattr("fedsim.studies.search.STARTUP", 2)
    options = ("--draws", "4", "--sampler", "tpe")
    _, table = sweep(tmp_path / "images", *options)
    images, searches = Digits.images, "digits/search.csv"

    def noise(reader, domain, apart=False):
        found, labels = images(reader, domain, apart)
        return np.random.default_rng(0).integers(0, 256, found.shape).astype(np.uint8) if apart else found, labels

    monkeypatch.setattr(Digits, "images", noise)
    _, other = sweep(tmp_path / "noise", *options)
    of_target = ["target_accuracy", "untuned_target_accuracy"]
    pd.testing.assert_frame_equal(other.drop(columns=of_target), table.drop(columns=of_target), check_exact=True)
    assert other[of_target].to_numpy().tolist() != table[of_target].to_numpy().tolist()
    assert (tmp_path / "noise" / searches).read_bytes() == (tmp_path / "images" / searches).read_bytes()


def searched(folder, scores, targets, steps=10):
    experiment = read_experiment("digits", ["run.target=rot0", f"run.output={folder}", "name=x"])
    trials = []
    for number, (score, target) in enumerate(zip(scores, targets)):
        cell = Cell(experiment, folder / "x" / f"draw{number}" / "rot0" / "seed0", "finished")
        cell.folder.mkdir(parents=True)
        row = {"method": "fedavg", "target": "rot0", "seed": 0, "steps": steps}
        for rule in RULES:
            row |= {f"{rule}_round": 1, f"{rule}_target_accuracy": target}
        pd.DataFrame([row]).to_csv(cell.folder / "summary.csv", index=False)
        trials.append(Trial(number, {"train.lr": f"0.{number}"} if number else {}, number, [cell], [score]))
    search = Search("fedavg", ["rot0"], [0], (), len(scores))
    return PlannedSearch("digits", search, read_space(["train.lr=0.1,0.2"]), {"train.lr": 0.05}, trials, [], "")


def test_the_choices_of_other_sweeps_are_kept(tmp_path):
    """A sweep of another method writes its rows behind; one again replaces its own."""
    plan = searched(tmp_path, [0.5, 0.75], [0.4, 0.6])
    other = dataclasses.replace(plan, search=dataclasses.replace(plan.search, method="fedprox"))
    for sweep_plan in (plan, other, other):
        file = write_tuned([sweep_plan], [tuned_row(sweep_plan)])
    assert list(pd.read_csv(file)["method"]) == ["fedavg", "fedprox"]


def test_the_choice_by_hand(tmp_path):
    """The best validation counts, whatever the unseen domain says; a draw that failed costs and has no score."""
    plan = searched(tmp_path, [0.5, 0.75, 0.745, "failed"], [0.4, 0.6, 0.9, 0.99])
    row = tuned_row(plan)
    assert (row["draw"], row["values"], row["target_accuracy"], row["untuned_target_accuracy"]) == (
        1, "train.lr=0.1", 0.6, 0.4,
    )  # fmt: skip
    assert (row["score"], row["median_score"], row["near"], row["scored"], row["draws"]) == (0.75, 0.745, 2, 3, 4)
    assert (row["steps"], row["untuned_steps"], row["run"]) == (40, 10, "draw1/rot0/seed0")
    upper = tuned_row(plan, "oracle")  # its draw is another one, but how flat the validation was is the same
    assert (upper["draw"], upper["target_accuracy"], upper["score"]) == (2, 0.9, 0.75)
    # One point less, though as floating-point numbers it is more.
    assert tuned_row(searched(tmp_path / "point", [14 / 500, 9 / 500], [0.4, 0.6]))["near"] == 2
    table = tuned_table([row, {**row, "seed": 1, "target_accuracy": 0.7}], "title")
    assert [next(iter(column.cells)) for column in table.columns] == [
        "fedavg", "65.0 ± 7.1", "65.0 ± 7.1", "40.0 ± 0.0", "2.0 of 3", "0.5", "80 (4.0 x)",
    ]  # fmt: skip


def test_a_draw_that_was_refused_has_no_number_of_the_run_in_its_folder(tmp_path):
    """Draw 0 is the file's own values, whose folder may hold a run with other settings."""
    plan = searched(tmp_path, ["failed", 0.75], [0.4, 0.6])
    plan.trials[0].cells[0].state = "failed"
    row = tuned_row(plan)
    assert (row["draw"], row["target_accuracy"], row["untuned_target_accuracy"]) == (1, 0.6, None)
    assert (row["steps"], row["untuned_steps"]) == (10, None)


def test_a_sampler_depends_on_the_trials_alone():
    """A value that lies outside of its space, such as the file's own, is no information."""
    pytest.importorskip("optuna")
    knobs = read_space(["train.lr=log:0.001:0.1", "train.batch_size=8,16", "train.epochs=int:1:9"])
    earlier = [
        ({"train.lr": 0.001 * 1.4**n, "train.batch_size": 8 * (1 + n % 2), "train.epochs": 1 + n % 9}, n / 12)
        for n in range(12)
    ]
    outside = ({"train.lr": 5.0, "train.batch_size": 64, "train.epochs": 0}, 0.1)
    first, again, other = (suggest("tpe", 3, knobs, own) for own in (earlier, earlier, [outside, *earlier]))
    assert first == again
    for drawn in (first, other):
        rate, batch, epochs = (drawn[f"train.{name}"] for name in ("lr", "batch_size", "epochs"))
        assert 0.001 <= float(rate) <= 0.1
        assert rate == repr(float(f"{float(rate):.4g}"))
        assert (batch in ("8", "16"), epochs in map(str, range(1, 10))) == (True, True)


@pytest.mark.parametrize(("words", "said"), [
    (["--trials", "2"], "belong to --draws"), (["--draws", "2", "--grid", "train.lr=0.1,0.2"], "fix one with --set"),
    (["--draws", "2", "--trials", "2", "--seeds", "0,1"], "use one of the two"),
    (["--draws", "2", "--set", "data.split_seed=3"], "data.split_seed"),
    (["--draws", "2", "--select", "last"], "--select last"),
    (["--draws", "2", "--sampler", "tpx"], "did you mean 'tpe'"),
])  # fmt: skip
def test_what_a_sweep_with_draws_refuses(words, said):
    with pytest.raises(UserError, match=said):
        CliRunner().invoke(app, ["sweep", "digits", *words], catch_exceptions=False)


def test_a_pruned_draw_by_hand():
    """The median before at round 2 is .5: the seventh, at .4, is pruned there; what it recorded later has no effect."""
    pytest.importorskip("optuna")
    first = [{1: 0.3, 2: 0.6}, {1: 0.2, 2: 0.4}] * 3
    curves = [*first, {1: 0.3, 2: 0.4, 3: 0.9}, {1: 0.1, 2: 0.9}, {1: 0.4, 2: 0.7, 3: 0.8}]
    assert pruned_rounds("median", curves, 6) == [None] * 6 + [2, 1, None]
    assert pruned_rounds("median", curves[:7], 7) == [None] * 7
    curves[6] = {1: 0.3, 2: 0.4}
    assert pruned_rounds("median", curves, 6) == [None] * 6 + [2, 1, None]
    assert pruned_rounds("median", [{}, {1: float("nan")}], 0) == [None, None]


def test_draws_that_fall_behind_are_ended_and_stay_so(tmp_path, monkeypatch):
    """The worker of a pruned draw is ended before the last round; a second call runs nothing and has the same table."""
    pytest.importorskip("optuna")
    monkeypatch.setattr("fedsim.studies.search.STARTUP", 2)
    monkeypatch.setattr("fedsim.studies.search.pruned_rounds", lambda pruner, curves, spared: [
        next((round for round in curve if round >= 2 and number >= spared), None) for number, curve in enumerate(curves)
    ])  # fmt: skip
    rounds = ("--set", "train.rounds=20", "--set", "run.checkpoint_every=1")  # whose rows are seen one by one
    options = ("--draws", "4", "--pruner", "median", *rounds)
    shown, table = sweep(tmp_path, *options)
    assert table[["draws", "scored"]].to_numpy().tolist() == [[4, 2]]
    runs = sorted(map(pd.read_csv, (tmp_path / "digits").glob("fedprox*/rot75/seed0/rounds.csv")), key=len)
    assert len(runs[1]) < len(runs[2]) == len(runs[3]) == 21
    spent = [run["steps"][:3].sum() for run in runs[:2]] + [run["steps"].sum() for run in runs[2:]]
    assert table["steps"].item() == sum(spent)
    outcomes = pd.read_csv(tmp_path / "digits" / "search.csv")["outcome"].astype(str)
    assert outcomes.str.startswith("pruned after round 2").sum() == 2
    monkeypatch.setattr("fedsim.studies.loop.run_cells", lambda *given: pytest.fail("a pruned draw was run again"))
    assert sweep(tmp_path, *options)[0] == shown
