"""Runs of earlier versions, whose round was decided by the last bit of a sum: tables and models say so."""

import pandas as pd
import pytest
from invented import pacs_experiment, write_run
from typer.testing import CliRunner

from fedsim.commands.cli import app
from fedsim.results import Recorder, choose_runs, compare, read_runs
from fedsim.results.kept_model import other_round
from fedsim.run.checkpoint import write_arrays


def old_run(root, seed=0, rule="best_validation"):
    """A run with equal rounds 3 and 5, of which its summary names the later one; (folder, its rounds)."""
    folder = write_run(root, pacs_experiment("fedavg", "photo", seed, train={"rounds": 6}))
    file, column = folder / "rounds.csv", "mean_validation_accuracy" if rule == "best_validation" else "target_accuracy"
    rounds = pd.read_csv(file)
    rounds.loc[rounds["round"] == 3, column] = 0.96
    rounds.loc[rounds["round"] == 5, column] = 0.9600000000000001
    rounds.to_csv(file, index=False)
    later, summary = rounds.iloc[5], pd.read_csv(folder / "summary.csv").iloc[0].to_dict()
    summary |= {f"{rule}_round": 5, f"{rule}_target_accuracy": later["target_accuracy"]}
    Recorder(folder).write_summary(summary | {f"{rule}_mean_validation_accuracy": 0.9600000000000001})
    return folder, rounds


@pytest.mark.parametrize("rule", ["best_validation", "oracle"])
def test_tables_show_the_first_of_equal_rounds_of_an_old_run(tmp_path, rule):
    _, rounds = old_run(tmp_path, rule=rule)
    runs = read_runs(tmp_path, only=["summary"])
    assert runs.summary[f"{rule}_round"][0] == 3
    assert runs.summary[f"{rule}_target_accuracy"][0] == rounds["target_accuracy"][3]
    assert runs.summary[f"{rule}_mean_validation_accuracy"][0] == rounds["mean_validation_accuracy"][3]
    notes = [note for note in compare(runs, rule).notes if "(round 3 instead of 5)" in note]
    assert len(notes) == (rule == "best_validation")


def test_a_run_of_this_version_is_read_as_it_is(tmp_path):
    folder = write_run(tmp_path, pacs_experiment())
    runs = read_runs(tmp_path)
    recorded = pd.read_csv(folder / "summary.csv")
    assert runs.summary["best_validation_round"][0] == recorded["best_validation_round"][0]
    assert runs.reselected == {}
    assert not [note for note in compare(runs).notes if "instead" in note]


def test_the_note_is_about_the_chosen_runs(tmp_path):
    old_run(tmp_path, 0)
    old_run(tmp_path, 1)
    assert len(choose_runs(read_runs(tmp_path), seeds=[1]).reselected) == 1


def test_another_round_than_the_tables_is_said_of_the_kept_model(tmp_path):
    folder, _ = old_run(tmp_path)
    write_arrays(folder / "best.safetensors", {}, {"round": "5"})
    assert "of round 5" in other_round(folder)
    assert "round 3" in other_round(folder)
    write_arrays(folder / "best.safetensors", {}, {"round": "3"})
    assert other_round(folder) == ""
    write_arrays(folder / "best.safetensors", {})  # of a version that did not write the round
    assert other_round(folder) == ""
    assert other_round(tmp_path) == ""


def test_a_broken_line_of_rounds_is_left_out(tmp_path):
    folder, _ = old_run(tmp_path)
    with (folder / "rounds.csv").open("a") as file:
        file.write("7,0.99")
    assert read_runs(tmp_path).summary["best_validation_round"][0] == 3


def test_the_verb_says_it_too(tmp_path):
    old_run(tmp_path)
    said = CliRunner().invoke(app, ["compare", str(tmp_path / "pacs")]).output
    assert "round 3 instead of 5" in " ".join(said.split())


def test_a_selected_round_that_lacks_a_validation_is_named(tmp_path):
    """A mean without the client of a hard domain is greater. With equal counts or another rule nothing is said."""
    for seed, counts in enumerate(([3, 3, 3, 2, 3, 3, 3], [2, 2, 2, 2, 2, 2, 2])):
        folder = write_run(tmp_path, pacs_experiment("fedavg", "photo", seed, train={"rounds": 6}))
        rounds = pd.read_csv(folder / "rounds.csv")
        rounds.loc[rounds["round"] == 3, "mean_validation_accuracy"] = 0.999
        rounds.assign(validated=counts).to_csv(folder / "rounds.csv", index=False)
        summary = pd.read_csv(folder / "summary.csv").iloc[0].to_dict()
        Recorder(folder).write_summary(summary | {"best_validation_round": 3})
    runs = read_runs(tmp_path, only=["summary"])
    (run,) = runs.thin
    assert runs.thin[run] == "2 of 3"
    said = [note for note in compare(runs).notes if "validated by fewer clients" in note]
    assert len(said) == 1
    assert f"{run} (2 of 3 clients)" in said[0]
    assert not [note for note in compare(runs, "last").notes if "validated by fewer" in note]


def test_rounds_before_failures_were_allowed_count_with_all_clients(tmp_path):
    """A run that stopped at a lost site and went on without it: the later rounds lack that site's validation."""
    folder = write_run(tmp_path, pacs_experiment("fedavg", "photo", 0, train={"rounds": 6}))
    rounds = pd.read_csv(folder / "rounds.csv").assign(clients=[0, 3, 3, 3, 2, 2, 2])
    rounds["validated"] = [float("nan")] * 4 + [2, 2, 2]
    rounds.to_csv(folder / "rounds.csv", index=False)
    summary = pd.read_csv(folder / "summary.csv").iloc[0].to_dict()
    Recorder(folder).write_summary(summary | {"best_validation_round": 5})
    assert list(read_runs(tmp_path, only=["summary"]).thin.values()) == ["2 of 3"]


def with_clients(root, clients, seed=0):
    """A run of 3 rounds by a version that selected round 1 whatever its number of accepted replies was."""
    folder = write_run(root, pacs_experiment("fedavg", "photo", seed, train={"rounds": 3}))
    rounds = pd.read_csv(folder / "rounds.csv").assign(clients=clients, failed=[0, 3, 0, 0])
    rounds.loc[rounds["round"] == 1, "mean_validation_accuracy"] = 0.999
    rounds.to_csv(folder / "rounds.csv", index=False)
    summary = pd.read_csv(folder / "summary.csv").iloc[0].to_dict()
    Recorder(folder).write_summary(summary | {"best_validation_round": 1})
    return rounds


def test_a_round_that_no_reply_made_is_counted_and_another_one_selected(tmp_path):
    """The table has the best of the other rounds, and a note counts the rounds without a reply."""
    rounds = with_clients(tmp_path, [0, 0, 3, 3])
    runs = read_runs(tmp_path, only=["summary"])
    best = rounds.iloc[2:]["mean_validation_accuracy"].idxmax()
    (summary,) = runs.summary.to_dict("records")
    assert summary["best_validation_round"] == best
    assert summary["best_validation_target_accuracy"] == rounds.loc[best, "target_accuracy"]
    notes = " ".join(compare(runs).notes)
    assert "No client's reply was accepted in rounds of pacs/fedavg/photo/seed0 (1 of 3 rounds)" in notes
    assert "rounds rest on the others" not in notes


def test_a_run_in_which_nobody_trained_has_no_result(tmp_path):
    """Another version wrote a summary of the untrained model: the table has no number, and the note says why."""
    with_clients(tmp_path, 0)
    write_run(tmp_path, pacs_experiment("fedavg", "photo", 1, train={"rounds": 3}))
    comparison = compare(read_runs(tmp_path, only=["summary"]))
    assert comparison.cells["seeds"].max() == 1
    assert any("seed0 (3 of 3 rounds)" in note for note in comparison.notes)
