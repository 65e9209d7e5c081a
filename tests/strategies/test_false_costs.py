"""Numbers of one site that cannot be true: costs, losses, metrics of its own, and details that nobody asked for."""

import numpy as np
import pandas as pd
import pytest
from flwr.app import ConfigRecord, MetricRecord
from support import run_small, small_experiment
from tampering import CONTINUE, OTHERS, VICTIM, refused_row, rows_of, short, tamper

from fedsim.models.infer.alpha import ZeroShotAdapter
from strategies.weights.generalization_adjustment import adjust_weights
from strategies.wire.reply_checks import Expected, RejectedReplyError
from strategies.wire.target_site import DetailForm, TargetScore, read_score, score_records


def reporting(**numbers):
    """A change of a reply's metrics."""

    def change(content):
        content["metrics"] = MetricRecord({**content["metrics"], **numbers})

    return change


@pytest.mark.parametrize(("numbers", "reason"), [
    ({"steps": 10**30}, "steps is 1e+30, more than twice the 1 of the order"),
    ({"steps": 3}, "steps is 3, more than twice the 1 of the order"),
    ({"images": 65.0}, "images is 65, more than twice the 32 of the order"),
    ({"steps": 0.5}, "steps is 0.5, not a whole number"),
    ({"price": 3.0}, "unexpected metrics ['price']"),
    ({"gap": 3.0}, "unexpected metrics ['gap']"),
    ({"local_validation_accuracy": 1.0}, "unexpected metrics ['local_validation_accuracy']"),
])  # fmt: skip
def test_false_costs_and_metrics_of_its_own_are_refused(numbers, reason, tmp_path):
    """One step on 32 images is what FedAvg was told to do."""
    row = refused_row(tmp_path, reporting(**numbers))
    assert reason in row["status"]
    assert np.isnan(row["weight"])


def test_seconds_are_bounded_by_the_time_that_the_server_waited(tmp_path):
    late = tamper(reporting(evaluation_seconds=1e30), "evaluate", (1,))
    both = [tamper(reporting(train_seconds=1e30), "train", (1,)), late]
    folder, _ = run_small(short(tmp_path, 1), tamper=lambda message, reply: both[1](message, both[0](message, reply)))
    rows, rounds = rows_of(folder).loc[1], pd.read_csv(folder / "rounds.csv").iloc[1]
    assert rows["status"].eq("ok").all()
    assert (rows[["train_seconds", "evaluation_seconds"]] <= rounds["round_seconds"]).all(axis=None)
    assert pd.read_csv(folder / "summary.csv")["train_seconds"].iloc[0] < 3 * rounds["round_seconds"]


@pytest.mark.parametrize("loss", [-1e30, -0.1, 1e30, 1e4])
def test_a_loss_that_cannot_be_true_is_not_recorded(loss, tmp_path):
    """Cross-entropy is not negative, and 100 times the others' loss is no loss of the same task. The update counts."""
    honest, _ = run_small(short(tmp_path / "honest", 1))
    folder, _ = run_small(short(tmp_path / "attacked", 1), tamper=tamper(reporting(train_loss=loss), rounds=(1,)))
    rows = rows_of(folder).loc[1]
    assert np.isnan(rows.loc[VICTIM, "train_loss"])
    assert rows["status"].eq("ok").all()
    assert rows["weight"].notna().all()
    others = rows_of(honest).loc[1].loc[list(OTHERS)]
    mean = np.average(others["train_loss"], weights=others["examples"])
    assert pd.read_csv(folder / "rounds.csv")["train_loss"].iloc[1] == pytest.approx(mean)


def test_the_loss_of_one_client_of_three_is_no_mean(tmp_path):
    """Where most replies have no loss that can be true, the round has none: the empty cell is the mark."""
    change = tamper(reporting(train_loss=-1.0), rounds=(1,), clients=OTHERS)
    folder, _ = run_small(short(tmp_path, 1), tamper=change)
    assert np.isnan(pd.read_csv(folder / "rounds.csv")["train_loss"].iloc[1])
    assert np.isfinite(rows_of(folder).loc[(1, VICTIM), "train_loss"])


def test_a_loss_below_zero_is_recorded_where_a_part_says_that_it_may_be(tmp_path):
    """A term may make the loss negative: FedDyn's does."""
    change = tamper(reporting(train_loss=-0.1), rounds=(1,))
    folder, _ = run_small(short(tmp_path, 1, "feddyn"), tamper=change)
    assert rows_of(folder).loc[(1, VICTIM), "train_loss"] == -0.1


@pytest.mark.parametrize("gap", [1e30, -1e30, 101.0])
def test_a_gap_far_beyond_the_others_is_refused(gap, tmp_path):
    """The gap is a difference of losses, and is held to the others' as losses are."""
    row = refused_row(tmp_path, reporting(gap=gap, gap_valid=1), "feddg-ga")
    assert f"its gap is {gap:.3g}, the median of the others 0" in row["status"]


def test_what_the_largest_gap_within_the_limit_does():
    """It takes one step of d and no more, however large it is: by hand, K = 3, a = 1/3, d = 0.1."""
    start = dict.fromkeys("abc", 1 / 3)
    moderate = adjust_weights(start, {"a": 2.0, "b": 0.0, "c": 1.0}, 0.1)
    extreme = adjust_weights(start, {"a": 1e9, "b": 0.0, "c": 0.0}, 0.1)
    assert moderate["a"] == pytest.approx(1 / 3 + 0.1)
    assert extreme["a"] == pytest.approx((1 / 3 + 0.1) / (1 + 0.1 - 2 * 0.05))


ECHO = {"token": "t", "client": "rot75", "round": 3, "phase": "target"}
EXPECTED = Expected("rot75", "t", 3, "target", 100)
FORM = DetailForm({"alpha", "alpha_std"}, {"layer1.0"})


@pytest.mark.parametrize(("form", "details", "reason"), [
    (FORM, [("alpha", "layer1.0", 0.5)], ""),
    (FORM, [], ""),
    (DetailForm(), [("alpha", "layer1.0", 0.5)], "'alpha' of 'layer1.0', and nobody asked for it"),
    (FORM, [("alpha", "=HYPERLINK(1)", 0.5)], "'alpha' of '=HYPERLINK(1)', and nobody asked for it"),
    (FORM, [("price", "layer1.0", 0.5)], "'price' of 'layer1.0', and nobody asked for it"),
    (FORM, [("alpha", "layer1.0", 0.5)] * 2, "'alpha' of 'layer1.0' twice"),
])  # fmt: skip
def test_details_have_the_form_that_was_asked_for(form, details, reason):
    content = score_records(TargetScore(0.5, 1.0, 0.1, details), 100, "accuracy")
    content["echo"] = ConfigRecord(ECHO)
    if not reason:
        assert read_score(form, content, EXPECTED)[0].details == details
        return
    with pytest.raises(RejectedReplyError) as error:
        read_score(form, content, EXPECTED)
    assert reason in str(error.value)


def test_the_rule_names_its_quantities(tmp_path):
    """Details of a whole run are those that its rule names: alpha of every layer, four quantities each."""
    experiment = small_experiment(tmp_path, "fedig-a", train={"rounds": 1, "iterations": 1}, run=CONTINUE)
    folder, _ = run_small(experiment)
    rows = pd.read_csv(folder / "details.csv").query("client == 'rot45'")
    assert set(rows["quantity"]) == set(ZeroShotAdapter.quantities)
