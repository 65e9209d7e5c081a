"""A privacy budget that ends a run: `train.dp_max_epsilon`."""

import json

import pandas as pd
import pytest
from support import interrupt, run_small, tiny_experiment

from fedsim.analysis import compare
from fedsim.apps.strategy import strategy
from fedsim.common.errors import UserError
from fedsim.methods.recipe import Recipe
from fedsim.records import read_runs
from fedsim.runs.plan import resolve
from fedsim.runs.privacy_account import last_round, refuse_budget, spent
from fedsim.settings.experiment import Experiment
from strategies.fuse.private_mean import PrivateMean

# z = sqrt(2 ln 125000) = 4.844805, mu = sqrt(T) / z, and delta = Phi(mu/2 - e/mu) - exp(e) Phi(-mu/2 - e/mu) = 1e-5:
#     T = 3, e = 1.373236:  1.249353e-4 - 3.948105 x 2.911151e-5 = 1e-5
#     T = 4, e = 1.610316:  1.101915e-4 - 5.004393 x 2.002071e-5 = 1e-5
SEQUENCE = [0.750977, 1.098213, 1.373236, 1.610316, 1.822915, 2.018000]


def private(folder, budget, rounds=6, **train):
    """A run with epsilon 1 in each round; the noise does not decide which round is the last."""
    train = {"dp_clip": 0.001, "dp_epsilon": 1.0, "dp_max_epsilon": budget, **train}
    model, run = {"backbone": "digits-cnn"}, {"update_limit": 0}
    return tiny_experiment(folder, rounds=rounds, model=model, train=train, run=run)


def test_the_sequence_and_the_last_round_by_hand(tmp_path):
    experiment = private(tmp_path, 1.5)
    costs = [spent(experiment, Recipe(), 3, rounds).epsilon for rounds in range(1, 7)]
    assert costs == pytest.approx(SEQUENCE, abs=1e-6)
    for budget, last in [(0.7, 0), (0.76, 1), (1.37, 2), (1.38, 3), (1.61, 3), (1.62, 4), (2.1, 6), (99, 6), (0, 6)]:
        assert last_round(private(tmp_path, budget), Recipe(), 3) == last
    assert [last_round(experiment, Recipe(), 3, repeated) for repeated in range(4)] == [3, 2, 1, 0]
    assert last_round(private(tmp_path, 1.62, evaluate_every=3), Recipe(), 3) == 3  # of 4, the last that is validated
    assert last_round(private(tmp_path, 2.1, evaluate_every=4), Recipe(), 3) == 6  # all are played


def test_central_privacy_by_hand(tmp_path):
    """z = 10: after 100 rounds epsilon is that of one round with z = 1, 4.377188."""
    recipe = Recipe(fuse=PrivateMean(1.0, 10.0))
    for budget, last in [(4.377, 99), (4.378, 100)]:
        experiment = tiny_experiment(tmp_path, rounds=200, train={"dp_max_epsilon": budget})
        assert last_round(experiment, recipe, 3) == last


def test_the_run_ends_before_the_round_that_would_exceed_it(tmp_path, caplog):
    folder, grid = run_small(private(tmp_path, 1.5))
    assert pd.read_csv(folder / "rounds.csv")["round"].max() == 3
    assert pd.read_csv(folder / "summary.csv")["rounds"].item() == 3
    assert sum(message.metadata.message_type == "train" for message, _ in grid.seen) == 9  # three models of each client
    record = json.loads((folder / "environment.json").read_text())
    assert record["stopped"].pop("best_round") in (1, 2, 3)
    assert record["stopped"] == {
        "after_round": 3,
        "of_rounds": 6,
        "epsilon": pytest.approx(1.373236, abs=1e-6),
    }
    assert record["privacy"].startswith("local differential privacy: epsilon 1.373 at delta 1e-05 for a client's")
    assert "all 3 rounds" in record["privacy"]
    (note,) = [note for note in compare(read_runs(tmp_path)).notes if "budget" in note]
    assert note == (
        "Ended by the privacy budget (train.dp_max_epsilon): fedavg (of 6) after 3 rounds. Budgets follow from it."
    )


def test_a_run_that_validation_ends_first_says_what_it_has_spent(tmp_path):
    """Round 1 is the best of a model that does not move; two rounds later the run ends, within the budget."""
    folder, _ = run_small(private(tmp_path, 1.5, stop_after=1, dp_clip=1e-9, lr=1e-9))
    record = json.loads((folder / "environment.json").read_text())
    assert record["stopped"] == {"after_round": 2, "best_round": 1, "of_rounds": 6}
    assert "epsilon 1.098 " in record["privacy"]
    assert any("by source validation" in note for note in compare(read_runs(tmp_path)).notes)


@pytest.mark.parametrize(("after", "every", "last"), [(2, 1, 3), (3, 1, 3), (1, 3, 2)])
def test_a_resumed_run_keeps_to_the_budget(after, every, last, tmp_path):
    """Rounds that are repeated are spent, too: without a checkpoint, round 1 is played twice, and 2 is the last."""
    experiment = private(tmp_path, 1.5).replace(run={"checkpoint_every": every})
    interrupt(experiment, after)
    folder, _ = run_small(experiment)
    assert pd.read_csv(folder / "rounds.csv")["round"].max() == last
    record = json.loads((folder / "environment.json").read_text())
    assert record["stopped"]["epsilon"] == pytest.approx(1.373236, abs=1e-6)


def test_a_budget_that_interrupted_rounds_have_spent_is_one_line(tmp_path):
    experiment = private(tmp_path, 1.0).replace(run={"checkpoint_every": 3})
    interrupt(experiment.replace(train={"dp_max_epsilon": 0}), 1)
    with pytest.raises(UserError, match="another") as other:  # it is a setting of the run
        run_small(experiment)
    assert "dp_max_epsilon" in str(other.value)
    with pytest.raises(UserError, match=r"the first round and 1 interrupted ones would spend epsilon 1.098 at delta"):
        refuse_budget(experiment, Recipe(), 3, repeated=1)


def test_what_is_refused_leaves_nothing_behind(tmp_path):
    with pytest.raises(UserError, match=r"= 0.7 allows no round: the first round would spend epsilon 0.751 at delta"):
        run_small(private(tmp_path, 0.7))
    with pytest.raises(UserError, match=r"the rounds until the first validation \(3\) would spend epsilon 1.373"):
        resolve(private(tmp_path, 1.1, evaluate_every=3))
    with pytest.raises(UserError, match=r"this one has none; set train.dp_clip or method.fuse = 'private_mean'"):
        resolve(tiny_experiment(tmp_path, train={"dp_max_epsilon": 1.0}))
    with pytest.raises(UserError, match="dp_max_epsilon looks at the records"):
        strategy("fedavg", dp_max_epsilon=3.0, fuse="private_mean")
    assert list(tmp_path.iterdir()) == []


def test_runs_without_a_budget_have_the_hash_of_before():
    usual = Experiment()
    assert usual.replace(train={"dp_max_epsilon": 0}).settings_hash() == usual.settings_hash()
    assert usual.replace(train={"dp_max_epsilon": 3}).settings_hash() != usual.settings_hash()
