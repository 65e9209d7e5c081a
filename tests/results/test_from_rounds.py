"""Runs of earlier versions, whose round was decided otherwise or that lack replies: tables and models say so."""

import math

import pandas as pd
import pytest
from invented import pacs_experiment, write_run

from fedsim.results import Recorder, choose_runs, compare, read_runs
from fedsim.results.kept_model import other_round
from fedsim.run.checkpoint import write_arrays

LATER = 0.9600000000000001  # the last bit of a sum
RULES = {"best_validation": "mean_validation_accuracy", "oracle": "target_accuracy"}


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


def old_run(root, seed=0, rule="best_validation"):
    """A run with equal rounds 3 and 5, of which its summary names the later one."""
    said = {f"{rule}_round": 5, f"{rule}_mean_validation_accuracy": LATER}
    return rewritten(root, {3: 0.96, 5: LATER}, seed, column=RULES[rule], summary=said)


def summaries(root):
    return read_runs(root, only=["summary"])


def notes_with(runs, words, *rule):
    return [note for note in compare(runs, *rule).notes if words in note]


@pytest.mark.parametrize("rule", RULES)
def test_tables_show_the_first_of_equal_rounds_of_an_old_run(tmp_path, rule):
    _, rounds = old_run(tmp_path, rule=rule)
    runs = summaries(tmp_path)
    assert runs.summary[f"{rule}_round"][0] == 3
    for column in RULES.values():
        assert runs.summary[f"{rule}_{column}"][0] == rounds[column][3]
    assert len(notes_with(runs, "(round 3 instead of 5)", rule)) == (rule == "best_validation")
    write_run(tmp_path / "new", pacs_experiment())
    assert summaries(tmp_path / "new").reselected == {}


def test_the_note_is_about_the_chosen_runs_and_a_broken_line_is_left_out(tmp_path):
    for seed in (0, 1):
        folder, _ = old_run(tmp_path, seed)
    with (folder / "rounds.csv").open("a") as file:
        file.write("7,0.99")
    runs = read_runs(tmp_path)
    assert list(runs.summary["best_validation_round"]) == [3, 3]
    assert len(choose_runs(runs, seeds=[1]).reselected) == 1


def test_another_round_than_the_tables_is_said_of_the_kept_model(tmp_path):
    folder, _ = old_run(tmp_path)
    said = []
    for metadata in ({"round": "5"}, {"round": "3"}, {}):  # {}: of a version that did not write the round
        write_arrays(folder / "best.safetensors", {}, metadata)
        said.append(other_round(folder))
    assert "of round 5" in said[0]
    assert [*said[1:], other_round(tmp_path)] == ["", "", ""]


def test_a_selected_round_that_lacks_a_validation_is_named(tmp_path):
    """A mean without the client of a hard domain is greater. With equal counts or another rule nothing is said.

    Rounds in which a run stopped at every failure do not record the number: all clients that trained validated.
    """
    for seed, counts in enumerate(([3, 3, 3, 2, 3, 3, 3], [2] * 7, [math.nan] * 3 + [2] * 4)):
        clients = [0, 3, 3, 2, 2, 2, 2] if seed == 2 else 3
        best = {"best_validation_round": 3}
        rewritten(tmp_path, {3: 0.999}, seed, summary=best, validated=counts, clients=clients)
    runs = summaries(tmp_path)
    thin = {f"pacs/fedavg/photo/seed{seed}": "2 of 3" for seed in (0, 2)}
    assert runs.thin == thin
    (said,) = notes_with(runs, "validated by fewer clients")
    for run in thin:
        assert f"{run} (2 of 3 clients)" in said
    assert not notes_with(runs, "validated by fewer", "last")


@pytest.mark.parametrize("clients", [[0, 0, 3, 3], 0])
def test_rounds_that_no_reply_made_are_counted_and_never_selected(tmp_path, clients):
    """Another version selected round 1 of this run all the same, or the untrained model of a run without replies."""
    summary = {"best_validation_round": 1}
    _, rounds = rewritten(tmp_path, {1: 0.999}, rounds=3, summary=summary, clients=clients, failed=[0, 3, 0, 0])
    write_run(tmp_path, pacs_experiment("fedavg", "photo", 1, train={"rounds": 3}))
    runs = summaries(tmp_path)
    comparison = compare(runs)
    notes = " ".join(comparison.notes)
    if clients:
        best = rounds.iloc[2:]["mean_validation_accuracy"].idxmax()
        assert runs.summary["best_validation_round"][0] == best
        assert runs.summary["best_validation_target_accuracy"][0] == rounds.loc[best, "target_accuracy"]
        assert "No client's reply was accepted in rounds of pacs/fedavg/photo/seed0 (1 of 3 rounds)" in notes
        assert "rounds rest on the others" not in notes
    else:
        assert comparison.cells["seeds"].max() == 1
        assert "seed0 (3 of 3 rounds)" in notes
