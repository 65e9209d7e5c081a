"""The kept model is that of the round which the records select, also where rounds are equal but for the last bit."""

import pandas as pd
import pytest
from safetensors import safe_open
from support import Interrupt, run_small, small_experiment

from fedsim.run import session

TIED = {1: 0.6, 2: 0.1 + 0.2 + 0.3, 3: 0.5}  # rounds 1 and 2 are equal in exact arithmetic


@pytest.fixture
def tied_scores(monkeypatch):
    row_of = session.round_row

    def tied(log, *words):
        return row_of(log, *words) | {"mean_validation_accuracy": TIED.get(log.round, 0.1)}

    monkeypatch.setattr(session, "round_row", tied)


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
