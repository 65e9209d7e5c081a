"""Early stopping by source validation: `train.stop_after`."""

import json
import math

import pandas as pd
import pytest
from support import interrupt, numbers, run_small, tiny_experiment

from fedsim.analysis import compare
from fedsim.apps.strategy import strategy
from fedsim.common.errors import UserError
from fedsim.records import read_runs
from fedsim.records.selection import rounds_since_best
from fedsim.runs.origin import round_of
from fedsim.settings.experiment import Experiment


def test_rounds_since_the_best_one_by_hand():
    """Equal scores are no improvement, and a round without a score counts."""
    assert rounds_since_best([0.5]) == 0
    assert rounds_since_best([0.5, 0.8, 0.8, 0.7]) == 2
    assert rounds_since_best([0.5, math.nan, 0.6]) == 0
    assert rounds_since_best([0.5, math.nan, math.nan]) == 2
    assert rounds_since_best([math.nan, math.nan]) == 2


def hopeless(folder, **train):
    """A run whose learning rate is too small to change the predictions, so that round 1 is the best."""
    return tiny_experiment(folder, rounds=8, train={"lr": 1e-9, **train})


@pytest.mark.parametrize(
    ("settings", "last"),
    [({"stop_after": 2}, 3), ({"stop_after": 2, "evaluate_every": 3}, 6), ({"stop_after": 7}, 8), ({}, 8)],
)
def test_the_run_ends_after_so_many_rounds_without_a_better_validation(settings, last, tmp_path):
    """Round 1 is the best, and 3 is two rounds later. Where 3 and 6 alone are validated, 3 is the best."""
    folder, _ = run_small(hopeless(tmp_path, **settings))
    assert pd.read_csv(folder / "rounds.csv")["round"].max() == last
    assert pd.read_csv(folder / "summary.csv")["rounds"].item() == last
    assert round_of(folder / "last.safetensors") == last
    stopped = json.loads((folder / "environment.json").read_text()).get("stopped")
    best = settings.get("evaluate_every", 1)
    assert stopped == (None if last == 8 else {"after_round": last, "best_round": best, "of_rounds": 8})


def test_less_is_better_where_the_loss_selects(tmp_path):
    """A loss that falls in every round is an improvement in every round."""
    learning = tiny_experiment(
        tmp_path, rounds=5, run={"select_by": "loss"}, train={"lr": 0.05, "iterations": 4, "stop_after": 1}
    )
    folder, _ = run_small(learning)
    losses = pd.read_csv(folder / "rounds.csv")["mean_validation_loss"].iloc[1:]
    falls = losses.diff().iloc[1:] < 0
    last = len(losses)
    assert falls.iloc[: last - 2].all()
    assert last == 5 or not falls.iloc[-1]


@pytest.mark.parametrize(("after", "every"), [(1, 1), (3, 1), (2, 4)])
def test_a_run_that_was_killed_ends_at_the_same_round(after, every, tmp_path):
    """Also when it is killed after the round that ends it; a checkpoint is written in that round."""
    whole, _ = run_small(hopeless(tmp_path / "whole", stop_after=2))
    experiment = hopeless(tmp_path / "killed", stop_after=2).replace(run={"checkpoint_every": every})
    interrupt(experiment, after)
    folder, _ = run_small(experiment)
    assert numbers(folder / "rounds.csv").equals(numbers(whole / "rounds.csv"))
    assert round_of(folder / "last.safetensors") == 3
    for name in ("last", "best"):
        assert (folder / f"{name}.safetensors").read_bytes() == (whole / f"{name}.safetensors").read_bytes()


def test_a_comparison_names_the_runs_that_were_stopped(tmp_path):
    run_small(hopeless(tmp_path, stop_after=2))
    (note,) = [note for note in compare(read_runs(tmp_path)).notes if note.startswith("Stopped early")]
    assert "fedavg (of 8) after 3 rounds" in note


def test_it_is_a_setting_of_its_own(tmp_path):
    """Runs without it have the hash of before, and `run.patience` is the waiting for sites."""
    usual = Experiment()
    assert usual.replace(train={"stop_after": 0}).settings_hash() == usual.settings_hash()
    assert usual.replace(train={"stop_after": 3}).settings_hash() != usual.settings_hash()
    with pytest.raises(UserError, match="stop_after"):
        usual.replace(train={"stop_after": -1})
    with pytest.raises(UserError, match="stop_after looks at the records"):
        strategy("fedavg", stop_after=3)
