"""run.validation_domain: a domain on which no one trains selects the round."""

import pandas as pd
import pytest
from support import run_small, small_experiment

from fedsim.commands.runs import headline
from fedsim.data import client_names, load_pooled
from fedsim.errors import UserError
from fedsim.results import compare, read_runs
from fedsim.results.differences import comparable_settings
from fedsim.run.plan import complete, resolve
from fedsim.sweep import Axes
from fedsim.sweep.plan import plan_cells


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    """A run that trains on rot0 and rot15, selects on rot30 and is tested on rot45."""
    folder = tmp_path_factory.mktemp("held-out")
    return run_small(small_experiment(folder, run={"validation_domain": "rot30"}))[0]


def test_no_one_trains_on_it(held_out):
    clients = pd.read_csv(held_out / "clients.csv")
    assert set(clients["client"]) == {"rot0", "rot15"}
    assert not pd.read_csv(held_out / "rounds.csv")["validation_domain_accuracy"].isna().any()


def test_it_is_measured_as_an_unseen_domain(held_out, tmp_path):
    """With rot30 as the target, the same clients have the same accuracies on it in every round."""
    domains = {"domains": ["rot0", "rot15", "rot30"]}
    other, _ = run_small(small_experiment(tmp_path, data=domains, run={"target": "rot30"}))
    ours = pd.read_csv(held_out / "rounds.csv")
    theirs = pd.read_csv(other / "rounds.csv")
    assert ours["validation_domain_accuracy"].tolist() == theirs["target_accuracy"].tolist()
    assert ours["train_loss"].iloc[1:].tolist() == theirs["train_loss"].iloc[1:].tolist()


def test_it_selects_the_round(held_out):
    rounds, summary = pd.read_csv(held_out / "rounds.csv"), pd.read_csv(held_out / "summary.csv").iloc[0]
    trained = rounds[rounds["round"] >= 1]
    best = trained.loc[trained["validation_domain_accuracy"].idxmax()]
    assert summary["best_validation_round"] == best["round"]
    assert summary["best_validation_target_accuracy"] == best["target_accuracy"]
    assert summary["validation_domain"] == "rot30"
    assert "(best on rot30)" in headline(held_out)
    notes = compare(read_runs(held_out)).notes
    assert "The round was selected on rot30, on which no one trained." in notes


def test_the_pooled_client_lacks_it_too(tmp_path):
    experiment = small_experiment(tmp_path, run={"validation_domain": "rot0"})
    assert client_names(experiment.data, "rot45") == ["rot15", "rot30"]
    assert load_pooled(experiment.data, "rot45").domains == ("rot15", "rot30")
    assert resolve(experiment.replace(method={"name": "deepall"})).sources == 2


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"validation_domain": "rot45"}, "is the unseen domain"),
        ({"validation_domain": "rot31"}, "no domain 'rot31'"),
        ({"validation_domain": "rot30", "select_on": "local"}, "leave run.select_on"),
    ],
)
def test_a_wrong_one_is_refused(tmp_path, run, said):
    with pytest.raises(UserError, match=said):
        small_experiment(tmp_path, run=run)


def test_something_must_be_left_to_train_on(tmp_path):
    domains = {"domains": ["rot30", "rot45"]}
    with pytest.raises(UserError, match="nothing is left to train on"):
        resolve(complete(small_experiment(tmp_path, data=domains, run={"validation_domain": "rot30"})))


def test_a_sweep_over_all_targets_leaves_it_out(tmp_path):
    words = ["run.validation_domain=rot15", f"run.output={tmp_path}"]
    cells = plan_cells("digits", Axes(["fedavg"], ["all"], [0]), words, "")
    assert [cell.experiment.run.target for cell in cells] == ["rot0", "rot30", "rot45", "rot60", "rot75"]


def test_runs_with_and_without_are_not_mixed(tmp_path):
    ours = comparable_settings(small_experiment(tmp_path, run={"validation_domain": "rot30"}))
    assert ours["run.validation_domain"] == "rot30"
    plain = small_experiment(tmp_path)
    assert small_experiment(tmp_path, run={"validation_domain": "rot30"}).settings_hash() != plain.settings_hash()
