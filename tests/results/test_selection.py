"""Selection rules, with the numbers of the protocol's examples."""

import math

import numpy as np
import pandas as pd
import pytest
from invented import pacs_experiment

from fedsim.common.errors import UserError
from fedsim.results import select, summary_row
from fedsim.results.selection import RULES
from fedsim.run.round_rows import mean


def rounds_table(validation, target=None):
    target = target if target is not None else [0.1] * len(validation)
    columns = {"mean_validation_accuracy": validation, "target_accuracy": target}
    return pd.DataFrame({"round": range(len(validation)), **columns})


def test_best_validation_takes_the_first_of_equals_and_never_the_initial_model():
    assert select(rounds_table([0.99, 0.5, 0.8, 0.8, 0.7]))["round"] == 2


def test_best_validation_ignores_nan():
    assert select(rounds_table([0.1, math.nan, 0.3, math.nan]))["round"] == 2
    with pytest.raises(UserError, match="NaN in every round"):
        select(rounds_table([0.9, math.nan, math.nan]))


def test_rounds_that_no_reply_made_are_not_selected():
    """Their model is that of the round before; only `last` may be one. Without any other round there is no result."""
    table = rounds_table([0.1, 0.9, 0.5, 0.4], [0.1, 0.9, 0.2, 0.6]).assign(clients=[0, 0, 3, 3])
    assert [select(table, rule)["round"] for rule in RULES] == [2, 3, 3]
    for rule in RULES:
        with pytest.raises(UserError, match="no round was made: no client's reply was accepted in 3 rounds"):
            select(table.assign(clients=0), rule)


def test_last_and_oracle():
    table = rounds_table([0.1, 0.9, 0.3, 0.2], [0.99, 0.2, 0.7, 0.7])
    assert select(table, "last")["round"] == 3
    assert select(table, "oracle")["round"] == 2
    assert select(table.iloc[::-1], "last")["round"] == 3


def test_best_validation_never_reads_the_target():
    table = rounds_table([0.1, 0.5, 0.8, 0.7], [0.1, 0.9, 0.2, 0.3])
    blind = table.assign(target_accuracy=np.nan)
    assert select(table)["round"] == select(blind)["round"] == 2
    experiment = pacs_experiment()
    seen, unseen = summary_row(experiment, table), summary_row(experiment, blind)
    differing = {key for key in seen if repr(seen[key]) != repr(unseen[key])}
    assert {key for key in differing if key.startswith("best_validation")} == {"best_validation_target_accuracy"}


def test_select_on_local():
    table = rounds_table([0.1, 0.5, 0.8]).assign(mean_local_validation_accuracy=[math.nan, 0.9, 0.6])
    assert select(table, column="mean_local_validation_accuracy")["round"] == 1
    row = summary_row(pacs_experiment(run={"select_on": "local"}), table)
    assert row["best_validation_round"] == 1
    assert row["best_validation_mean_validation_accuracy"] == 0.5


def test_unknown_rule_and_missing_column():
    with pytest.raises(UserError, match="did you mean 'oracle'"):
        select(rounds_table([0.1, 0.2]), "oracel")
    with pytest.raises(UserError, match="mean_local_validation_accuracy"):
        select(rounds_table([0.1, 0.2]), column="mean_local_validation_accuracy")
    with pytest.raises(UserError, match="round 0 only"):
        select(rounds_table([0.1]))


def test_summary_of_a_diverged_run_has_empty_cells():
    row = summary_row(pacs_experiment(), rounds_table([0.1, math.nan], [0.1, math.nan]))
    assert row["best_validation_round"] is None
    assert row["last_round"] == 1
    assert all(f"{rule}_target_accuracy" in row for rule in RULES)


def test_summary_costs():
    table = rounds_table([0.1, 0.2, 0.3, 0.4]).assign(
        bytes_down=[None, 10, 10, 10],
        bytes_up=[None, 4, 4, 5],
        round_seconds=[9.0, 1.0, 2.0, 6.0],
        train_seconds=[None, 0.5, 0.5, 0.5],
    )
    row = summary_row(pacs_experiment(), table, label="FedAvg")
    assert (row["bytes_down_per_round"], row["seconds_per_round"], row["train_seconds"]) == (10, 2.0, 1.5)
    assert row["bytes_up_per_round"] == pytest.approx(13 / 3)
    assert row["label"] == "FedAvg"


def test_a_tie_in_exact_arithmetic_is_a_tie():
    """The same mean has another last bit when its sum was taken in another order, or when it is at half a digit."""
    first, later = 0.6, 0.1 + 0.2 + 0.3
    assert later > first
    assert select(rounds_table([0.1, first, later, later]))["round"] == 1
    assert select(rounds_table([0.1] * 4, [0.0, first, later, 0.2]), "oracle")["round"] == 1
    half = 5 / 1024  # 0.0048828125: half a digit where nine are left
    assert select(rounds_table([0.1, np.nextafter(half, 0), half, np.nextafter(half, 1)]))["round"] == 1
    assert select(rounds_table([0.1, 0.5, 0.5 + 1e-8]))["round"] == 2
    assert summary_row(pacs_experiment(), rounds_table([0.1, first, later]))["best_validation_round"] == 1


def test_every_client_counts_the_same_in_the_mean_validation():
    """Clients of one domain are not pooled, and their numbers of validation examples do not count."""
    accuracies = {"photo/0": (1.0, 30), "photo/1": (0.0, 10), "sketch": (0.5, 5), "cartoon": (None, 5)}
    rows = [{"client": name, "validation_accuracy": a, "examples": n} for name, (a, n) in accuracies.items()]
    assert mean(rows, "validation_accuracy") == pytest.approx((1 + 0 + 0.5) / 3)
