"""The kept model is that of the round which the records select, also of equal rounds and of repeated ones."""

import numpy as np
import pandas as pd
import pytest
from support import Interrupt, run_small, tiny_experiment

from fedsim.run import session
from fedsim.run.checkpoint import link_file, unfinished, write_arrays
from fedsim.run.inference_bank import kept_entries, round_of, take_over_best
from fedsim.run.plan import run_folder

TIED = {1: 0.6, 2: 0.1 + 0.2 + 0.3, 3: 0.5}  # rounds 1 and 2 are equal in exact arithmetic


@pytest.fixture
def scores(monkeypatch):
    row_of, scores = session.round_row, {}

    def scored(log, *words):
        return row_of(log, *words) | {"mean_validation_accuracy": scores.get(log.round, 0.1)}

    monkeypatch.setattr(session, "round_row", scored)
    return scores


def check_kept(folder, best):
    assert pd.read_csv(folder / "summary.csv")["best_validation_round"][0] == best
    assert round_of(folder / "best.safetensors") == str(best)


@pytest.mark.parametrize("stop", [None, 2])
def test_the_first_of_equal_rounds_is_kept(tmp_path, scores, stop):
    """Also by a run that is resumed from the later one of the equal rounds."""
    scores |= TIED
    experiment = tiny_experiment(tmp_path, rounds=3)
    if stop:
        with pytest.raises(KeyboardInterrupt):
            run_small(experiment, Interrupt(stop))
    folder, _ = run_small(experiment)
    check_kept(folder, 1)
    assert (folder / "predictions" / "round000001.safetensors").is_file()


@pytest.mark.parametrize(
    ("method", "first", "again", "best"),  # scores by round, of both attempts
    [("copa", {3: 0.9}, {}, 2), ("fedavg", {1: 0.9, 3: 0.95}, {}, 1), ("fedavg", {3: 0.9}, {3: 0.8}, 3)],
)
def test_a_model_of_an_interrupted_attempt_is_not_kept(tmp_path, scores, method, first, again, best):
    """Rounds after the last checkpoint are repeated, and may have other scores then: noise does not repeat."""
    experiment = tiny_experiment(tmp_path, method, 4, run={"checkpoint_every": 2})
    scores |= {2: 0.5} | first
    with pytest.raises(KeyboardInterrupt):
        run_small(experiment, Interrupt(3))
    folder = run_folder(experiment)
    assert round_of(folder / "best.safetensors") == ("1" if 1 in first else "2")  # as round 2 was saved
    scores.clear()
    scores |= again
    run_small(experiment)
    check_kept(folder, best)
    assert bool(kept_entries(folder, "best")) == (method == "copa")  # its heads, of the same round


@pytest.mark.parametrize(("round", "taken"), [(4, True), (5, False)])
def test_a_best_model_waits_for_its_checkpoint(tmp_path, round, taken):
    """A run that was killed after checkpoint 4, before the move, has it after resuming."""
    for name in ("best.safetensors", "inference/best.safetensors"):
        write_arrays(tmp_path / "checkpoint" / name, {}, {"round": str(round)})
    take_over_best(tmp_path, tmp_path / "checkpoint", 4)
    take_over_best(tmp_path, tmp_path / "checkpoint", 4)  # nothing waits any more
    left = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.safetensors")}
    assert left == ({"best.safetensors", "inference/best.safetensors"} if taken else set())


@pytest.fixture
def saved(tmp_path):
    write_arrays(tmp_path / "arrays.safetensors", {"w": np.arange(3.0)})
    return tmp_path / "arrays.safetensors"


@pytest.mark.parametrize("killed", [False, True])
def test_a_link_made_again_leaves_nothing_else(saved, killed):
    best = saved.with_name("best.safetensors")
    for _ in range(2):
        if killed:
            unfinished(saved).write_bytes(b"cut")
            unfinished(best).write_bytes(b"cut")
            write_arrays(saved, {"w": np.zeros(2)})
        link_file(saved, best)
        assert {file.name for file in saved.parent.iterdir()} == {saved.name, best.name}
        assert best.read_bytes() == saved.read_bytes()
