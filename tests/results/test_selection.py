"""Selection rules, with the numbers of the protocol's examples."""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from invented import pacs_experiment

from fedsim.common.errors import UserError
from fedsim.results import select, summary_row
from fedsim.results.selection import RULES
from fedsim.run.round_rows import round_row

LOCAL = "mean_local_validation_accuracy"
FIRST, LATER = 0.6, 0.1 + 0.2 + 0.3  # a mean has another last bit when its sum was taken in another order
HALF = 5 / 1024  # 0.0048828125: half a digit where nine are left


def rounds_table(validation, target=None, **columns):
    own = {"mean_validation_accuracy": validation, "target_accuracy": target or [0.1] * len(validation)}
    return pd.DataFrame({"round": range(len(validation)), **own, **columns})


@pytest.mark.parametrize(("validation", "selected"), [
    ([0.99, 0.5, 0.8, 0.8, 0.7], 2),  # the first of equals, and never the initial model
    ([0.1, math.nan, 0.3, math.nan], 2), ([0.1, FIRST, LATER, LATER], 1),
    ([0.1, np.nextafter(HALF, 0), HALF, np.nextafter(HALF, 1)], 1), ([0.1, 0.5, 0.5 + 1e-8], 2),
])  # fmt: skip
def test_best_validation(validation, selected):
    assert LATER > FIRST
    assert select(rounds_table(validation))["round"] == selected
    assert summary_row(pacs_experiment(), rounds_table(validation))["best_validation_round"] == selected
    assert select(rounds_table([0.1] * len(validation), validation), "oracle")["round"] == selected


def test_rounds_that_no_reply_made_are_not_selected():
    """Their model is that of the round before; only `last` may be one. Without any other round there is no result."""
    table = rounds_table([0.1, 0.9, 0.5, 0.4], [0.1, 0.9, 0.6, 0.2], clients=[0, 0, 3, 3])
    assert [select(table.iloc[::-1], rule)["round"] for rule in RULES] == [2, 3, 2]
    for rule in RULES:
        with pytest.raises(UserError, match="no round was made: no client's reply was accepted in 3 rounds"):
            select(table.assign(clients=0), rule)


def test_best_validation_never_reads_the_target():
    table = rounds_table([0.1, 0.5, 0.8, 0.7], [0.1, 0.9, 0.2, 0.3])
    blind = table.assign(target_accuracy=np.nan)
    seen, unseen = summary_row(pacs_experiment(), table), summary_row(pacs_experiment(), blind)
    differing = {key for key in seen if repr(seen[key]) != repr(unseen[key])}
    assert {key for key in differing if key.startswith("best_validation")} == {"best_validation_target_accuracy"}


def test_select_on_local():
    table = rounds_table([0.1, 0.5, 0.8], **{LOCAL: [math.nan, 0.9, 0.6]})
    assert select(table, column=LOCAL)["round"] == 1
    row = summary_row(pacs_experiment(run={"select_on": "local"}), table)
    assert (row["best_validation_round"], row["best_validation_mean_validation_accuracy"]) == (1, 0.5)


@pytest.mark.parametrize(("validation", "words", "said"), [
    ([0.1, 0.2], {"rule": "oracel"}, "did you mean 'oracle'"), ([0.1, 0.2], {"column": LOCAL}, LOCAL),
    ([0.1], {}, "round 0 only"), ([0.9, math.nan, math.nan], {}, "NaN in every round"),
])  # fmt: skip
def test_what_cannot_be_selected_is_said(validation, words, said):
    with pytest.raises(UserError, match=said):
        select(rounds_table(validation), **words)


def test_summary_of_a_diverged_run_has_empty_cells():
    row = summary_row(pacs_experiment(), rounds_table([0.1, math.nan], [0.1, math.nan]))
    assert (row["best_validation_round"], row["last_round"]) == (None, 1)
    assert all(f"{rule}_target_accuracy" in row for rule in RULES)


def test_summary_costs():
    costs = {"bytes_down": [None, 10, 10, 10], "bytes_up": [None, 4, 4, 5], "round_seconds": [9.0, 1.0, 2.0, 6.0]}
    table = rounds_table([0.1, 0.2, 0.3, 0.4], **costs, train_seconds=[0.25, 0.5, 0.5, 0.5])
    row = summary_row(pacs_experiment(), table, label="FedAvg")
    assert (row["bytes_down_per_round"], row["seconds_per_round"], row["train_seconds"]) == (10, 2.0, 1.75)
    assert (row["bytes_up_per_round"], row["label"]) == (pytest.approx(13 / 3), "FedAvg")


def test_every_client_counts_the_same_in_the_mean_validation_and_by_its_examples_in_the_loss():
    """Clients of one domain are not pooled. By hand: the loss is (30 * 1 + 10 * 2 + 5 * 3) / 45."""
    found = {"photo/0": (1.0, 30, 1.0), "photo/1": (0.0, 10, 2.0), "sketch": (0.5, 5, 3.0), "cartoon": (None, 5, None)}
    rows = {
        name: {
            "validation_accuracy": a,
            "examples": n,
            "train_loss": loss,
            "status": "ok",
            "bytes_down": 1,
            "bytes_up": 1,
        }
        for name, (a, n, loss) in found.items()
    }
    log = SimpleNamespace(clients=rows, round=1, started=0.0, aggregation_seconds=0.0)
    row = round_row(log, SimpleNamespace(value=0.5, loss=1.0, seconds=0.0), pacs_experiment(), "accuracy", 0.0)
    assert row["mean_validation_accuracy"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert row["train_loss"] == pytest.approx(65 / 45)
