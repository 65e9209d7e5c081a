"""The kept model is that of the round which the records select, also where rounds are equal but for the last bit."""

import pandas as pd
import pytest
from safetensors import safe_open
from support import Interrupt, run_small, small_experiment

from fedsim.results import read_runs
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
