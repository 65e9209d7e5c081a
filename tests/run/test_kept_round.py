"""The kept model is that of the round which the records select, also where rounds are equal but for the last bit."""

import pandas as pd
import pytest
from safetensors import safe_open
from support import Interrupt, run_small, small_experiment

from fedsim.results import read_runs
from fedsim.run.checkpoint import write_arrays
from fedsim.run.inference_bank import kept_entries, take_over_best
from fedsim.run.plan import resolve
from fedsim.run.session import Session

TIED = {1: 0.6, 2: 0.1 + 0.2 + 0.3, 3: 0.5}  # rounds 1 and 2 are equal in exact arithmetic


@pytest.fixture
def tied_scores(monkeypatch):
    row_of = Session._round_row

    def tied(self, log, score):
        return row_of(self, log, score) | {self.validation: TIED.get(log.round, 0.1)}

    monkeypatch.setattr(Session, "_round_row", tied)


def round_of(file):
    with safe_open(file, framework="numpy") as content:
        return int(content.metadata()["round"])


@pytest.mark.usefixtures("tied_scores")
@pytest.mark.parametrize("stop", [None, 2])
def test_the_first_of_equal_rounds_is_kept(tmp_path, stop):
    """Also by a run that is resumed from the later one of the equal rounds."""
    experiment = small_experiment(tmp_path, train={"rounds": 3})
    if stop:
        with pytest.raises(KeyboardInterrupt):
            run_small(experiment, Interrupt(stop))
    folder, _ = run_small(experiment)
    assert pd.read_csv(folder / "summary.csv")["best_validation_round"][0] == 1
    assert round_of(folder / "best.safetensors") == 1
    assert (folder / "predictions" / "round000001.safetensors").is_file()


@pytest.mark.parametrize(
    ("first", "again", "best"),
    [({3: 0.9}, {}, 2), ({1: 0.9, 3: 0.95}, {}, 1), ({3: 0.9}, {3: 0.8}, 3)],  # scores by round, of both attempts
)
def test_a_model_of_an_interrupted_attempt_is_not_kept(tmp_path, monkeypatch, first, again, best):
    """Rounds after the last checkpoint are repeated, and may have other scores then: noise does not repeat."""
    row_of, scores = Session._round_row, {}

    def scored(self, log, score):
        return row_of(self, log, score) | {self.validation: scores.get(log.round, 0.1)}

    monkeypatch.setattr(Session, "_round_row", scored)
    experiment = small_experiment(tmp_path, "copa", train={"rounds": 4}, run={"checkpoint_every": 2})
    scores |= {2: 0.5} | first
    with pytest.raises(KeyboardInterrupt):
        run_small(experiment, Interrupt(3))
    folder = resolve(experiment).folder
    assert round_of(folder / "best.safetensors") == (1 if 1 in first else 2)  # as round 2 was saved
    scores.clear()
    scores |= again
    run_small(experiment)
    assert pd.read_csv(folder / "summary.csv")["best_validation_round"][0] == best
    assert round_of(folder / "best.safetensors") == best
    assert kept_entries(folder, "best")  # COPA's heads, of the same round


@pytest.mark.parametrize(("round", "taken"), [(4, True), (5, False)])
def test_a_best_model_waits_for_its_checkpoint(tmp_path, round, taken):
    """A run that was killed after checkpoint 4, before the move, has it after resuming."""
    for name in ("best.safetensors", "inference/best.safetensors"):
        write_arrays(tmp_path / "checkpoint" / name, {}, {"round": str(round)})
    take_over_best(tmp_path, tmp_path / "checkpoint", 4)
    take_over_best(tmp_path, tmp_path / "checkpoint", 4)  # nothing waits any more
    left = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.safetensors")}
    assert left == ({"best.safetensors", "inference/best.safetensors"} if taken else set())


LACKING = {1: (3, 0.80), 2: (2, 0.85), 3: (3, 0.79)}  # round: clients that validated, their mean


@pytest.mark.parametrize("stop", [None, 2])
def test_a_round_that_lacks_a_client_is_not_selected(tmp_path, monkeypatch, stop):
    """Without the client of a hard domain the mean is greater, and the model is not better."""
    row_of = Session._round_row

    def lacking(self, log, score):
        validated, mean = LACKING.get(log.round, (3, 0.1))
        row = row_of(self, log, score)
        assert row["validated"] == (3 if log.round else 0)
        return row | {self.validation: mean, "validated": validated}

    monkeypatch.setattr(Session, "_round_row", lacking)
    experiment = small_experiment(tmp_path, train={"rounds": 3}, run={"on_client_failure": "continue"})
    if stop:
        with pytest.raises(KeyboardInterrupt):
            run_small(experiment, Interrupt(stop))
    folder, _ = run_small(experiment)
    assert pd.read_csv(folder / "summary.csv")["best_validation_round"][0] == 1
    assert round_of(folder / "best.safetensors") == 1
    assert read_runs(tmp_path).summary["best_validation_round"][0] == 1
    assert not read_runs(tmp_path).reselected
