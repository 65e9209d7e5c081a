"""Selection rules, with the numbers of the protocol's examples."""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from invented import pacs_experiment, write_run

from fedsim.analysis import compare
from fedsim.common.errors import UserError
from fedsim.records import Recorder, read_runs, select, summary_row
from fedsim.records.selection import RULES, is_better
from fedsim.runs.round_rows import round_row

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


def test_summaries_of_local_models_of_a_diverged_run_and_of_costs():
    table = rounds_table([0.1, 0.5, 0.8], **{LOCAL: [math.nan, 0.9, 0.6]})
    assert select(table, column=LOCAL)["round"] == 1
    row = summary_row(pacs_experiment(run={"select_on": "local"}), table)
    assert (row["best_validation_round"], row["best_validation_mean_validation_accuracy"]) == (1, 0.5)
    # A run that has diverged has empty cells.
    row = summary_row(pacs_experiment(), rounds_table([0.1, math.nan], [0.1, math.nan]))
    assert (row["best_validation_round"], row["last_round"]) == (None, 1)
    assert all(f"{rule}_target_accuracy" in row for rule in RULES)
    costs = {"bytes_down": [None, 10, 10, 10], "bytes_up": [None, 4, 4, 5], "round_seconds": [9.0, 1.0, 2.0, 6.0]}
    table = rounds_table([0.1, 0.2, 0.3, 0.4], **costs, train_seconds=[0.25, 0.5, 0.5, 0.5])
    row = summary_row(pacs_experiment(), table, label="FedAvg")
    assert (row["bytes_down_per_round"], row["seconds_per_round"], row["train_seconds"]) == (10, 2.0, 1.75)
    assert (row["bytes_up_per_round"], row["label"]) == (pytest.approx(13 / 3), "FedAvg")


@pytest.mark.parametrize(("validation", "words", "said"), [
    ([0.1, 0.2], {"rule": "oracel"}, "did you mean 'oracle'"), ([0.1, 0.2], {"column": LOCAL}, LOCAL),
    ([0.1], {}, "round 0 only"), ([0.9, math.nan, math.nan], {}, "NaN in every round"),
])  # fmt: skip
def test_what_cannot_be_selected_is_said(validation, words, said):
    with pytest.raises(UserError, match=said):
        select(rounds_table(validation), **words)


def test_every_client_counts_the_same_in_the_mean_validation_and_by_its_examples_in_the_loss():
    """Clients of one domain are not pooled. By hand: the loss is (30 * 1 + 10 * 2 + 5 * 3) / 45."""
    found = {"photo/0": (1.0, 30, 1.0), "photo/1": (0.0, 10, 2.0), "sketch": (0.5, 5, 3.0), "cartoon": (None, 5, None)}
    same = {"status": "ok", "bytes_down": 1, "bytes_up": 1}
    names = ("validation_accuracy", "examples", "train_loss")
    rows = {name: dict(zip(names, values)) | same for name, values in found.items()}
    log = SimpleNamespace(clients=rows, round=1, started=0.0, aggregation_seconds=0.0)
    row = round_row(log, SimpleNamespace(value=0.5, loss=1.0, seconds=0.0), pacs_experiment(), "accuracy", 0.0)
    assert row["mean_validation_accuracy"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert row["train_loss"] == pytest.approx(65 / 45)


def rewritten(root, best=None, seed=0, rounds=6, column="mean_validation_accuracy", summary=None, **columns):
    """(folder of a run, its rounds) with other values in them: those of `best` by round, whole columns, the summary."""
    folder = write_run(root, pacs_experiment("fedavg", "photo", seed, train={"rounds": rounds}))
    table = pd.read_csv(folder / "rounds.csv").assign(**columns)
    for round_, value in (best or {}).items():
        table.loc[table["round"] == round_, column] = value
    table.to_csv(folder / "rounds.csv", index=False)
    own = pd.read_csv(folder / "summary.csv").iloc[0].to_dict()
    Recorder(folder).write_summary(own | (summary or {}))
    return folder, table


def summaries(root):
    return read_runs(root, only=["summary"])


def said(kind, runs):
    return {run: own[kind] for run, own in runs.notes.items() if kind in own}


def notes_with(runs, words, *rule):
    return [note for note in compare(runs, *rule).notes if words in note]


def test_a_selected_round_that_lacks_a_validation_is_named(tmp_path):
    """A mean without the client of a hard domain is greater. With equal counts or another rule nothing is said.

    Rounds in which a run stopped at every failure do not record the number: all clients that trained validated.
    """
    for seed, counts in enumerate(([3, 3, 3, 2, 3, 3, 3], [2] * 7, [math.nan] * 3 + [2] * 4)):
        clients = [0, 3, 3, 2, 2, 2, 2] if seed == 2 else 3
        best = {"best_validation_round": 3}
        rewritten(tmp_path, {3: 0.999}, seed, summary=best, validated=counts, clients=clients)
    runs = summaries(tmp_path)
    thin = {f"pacs/fedavg/photo/seed{seed}": "2 of 3 clients" for seed in (0, 2)}
    assert said("thin", runs) == thin
    (note,) = notes_with(runs, "validated by fewer clients")
    for run in thin:
        assert f"{run} (2 of 3 clients)" in note
    assert not notes_with(runs, "validated by fewer", "last")


def test_rounds_that_no_reply_made_are_counted(tmp_path):
    rewritten(tmp_path, rounds=3, clients=[0, 0, 3, 3], failed=[0, 3, 0, 0])
    notes = " ".join(compare(summaries(tmp_path)).notes)
    assert "No client's reply was accepted in rounds of pacs/fedavg/photo/seed0 (1 of 3 rounds)" in notes
    assert "rounds rest on the others" not in notes


def test_a_round_is_better_only_by_a_strict_improvement():
    """The first of equals stays, also where sums in another order differ in the last bit; NaN is no score."""
    third = 0.1 + 0.2
    assert [is_better(*pair) for pair in ((0.6, 0.5), (0.5, 0.5), (third, 0.3), (0.4, 0.5))] == [True] + 3 * [False]
    assert is_better(0.5, math.nan)
    assert not is_better(math.nan, 0.5)
    assert not is_better(math.nan, math.nan)
