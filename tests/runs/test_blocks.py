"""Rounds of less than a second are recorded in blocks; what a kill leaves is a whole record up to a checkpoint."""

import pandas as pd
import pytest
from safetensors.numpy import load_file
from support import Interrupt, numbers, run_folder, run_small, tiny_experiment

from fedsim.records.callbacks import RunCallback
from fedsim.runs import session
from fedsim.runs.checkpoint import load_checkpoint


class Look(RunCallback):
    """Notes after each round which rounds the files have, and the round of the checkpoint."""

    def __init__(self, folder):
        self.folder, self.rows, self.saved = folder, [], []

    def on_round(self, row, clients):
        self.rows.append(len(pd.read_csv(self.folder / "rounds.csv")))
        self.saved.append(load_checkpoint(self.folder / "checkpoint").round)


def by_time(output, rounds=5, **run):
    return tiny_experiment(output, rounds=rounds, run={"checkpoint_every": 0, **run})


def same_records(one, other):
    for name in ("rounds.csv", "clients.csv", "summary.csv"):
        assert numbers(one / name).equals(numbers(other / name)), name
    for name in ("best.safetensors", "last.safetensors"):
        first, second = load_file(one / name), load_file(other / name)
        assert all((first[key] == second[key]).all() for key in first), name
    names = [sorted(file.name for file in (folder / "predictions").iterdir()) for folder in (one, other)]
    assert names[0] == names[1]


def test_short_rounds_wait_for_the_last(tmp_path):
    """The first round is written at once, and the others with the last, where all take less than a second."""
    experiment = by_time(tmp_path)
    look = Look(run_folder(experiment))
    run_small(experiment, look)
    assert look.rows == [1, 2, 2, 2, 2, 6]
    assert look.saved == [0, 1, 1, 1, 1, 5]


def test_rounds_of_a_second_are_written_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "WRITE_SECONDS", 0.0)
    experiment = by_time(tmp_path)
    look = Look(run_folder(experiment))
    run_small(experiment, look)
    assert look.rows == [1, 2, 3, 4, 5, 6]
    assert look.saved == [0, 1, 2, 3, 4, 5]


def test_rows_are_written_in_time_without_a_checkpoint(tmp_path, monkeypatch):
    """Who watches a run with rare checkpoints sees its rows, and the predictions that may still be selected stay."""
    monkeypatch.setattr(session, "WRITE_SECONDS", 0.0)
    experiment = by_time(tmp_path, checkpoint_every=3)
    look = Look(run_folder(experiment))
    run_small(experiment, look)
    assert look.rows == [1, 2, 3, 4, 5, 6]
    assert look.saved == [0, 0, 0, 3, 3, 5]


@pytest.mark.parametrize("every", [0, 1, 2, 100])
def test_records_do_not_depend_on_when_they_are_written(tmp_path, every):
    usual, _ = run_small(tiny_experiment(tmp_path / "usual", rounds=5))
    other, _ = run_small(by_time(tmp_path / "other", checkpoint_every=every))
    same_records(usual, other)


@pytest.mark.parametrize("after", [0, 2, 4])
def test_an_interrupted_run_has_its_rows_and_ends_as_an_unbroken_one(tmp_path, after):
    """The rows of the rounds that were played are there; the rounds after the checkpoint are played again."""
    usual, _ = run_small(by_time(tmp_path / "usual"))
    experiment = by_time(tmp_path / "broken")
    with pytest.raises(KeyboardInterrupt):
        run_small(experiment, Interrupt(after))
    folder = run_folder(experiment)
    assert list(pd.read_csv(folder / "rounds.csv")["round"]) == list(range(after + 1))
    run_small(experiment)
    same_records(usual, folder)


def test_a_deployed_run_saves_every_round(tmp_path):
    """Other machines would have to compute again what this one has not saved."""
    experiment = by_time(tmp_path, runtime="deployment")
    look = Look(run_folder(experiment))
    run_small(experiment, look)
    assert look.saved == [0, 1, 2, 3, 4, 5]
