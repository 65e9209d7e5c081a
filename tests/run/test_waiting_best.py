"""The best model of rounds after the last checkpoint waits for the next one, because a resumed run repeats them."""

import pandas as pd
import pytest
from support import Interrupt, run_small, small_experiment

from fedsim.run import session
from fedsim.run.checkpoint import write_arrays
from fedsim.run.inference_bank import kept_entries, round_of, take_over_best
from fedsim.run.plan import resolve


@pytest.mark.parametrize(
    ("first", "again", "best"),
    [({3: 0.9}, {}, 2), ({1: 0.9, 3: 0.95}, {}, 1), ({3: 0.9}, {3: 0.8}, 3)],  # scores by round, of both attempts
)
def test_a_model_of_an_interrupted_attempt_is_not_kept(tmp_path, monkeypatch, first, again, best):
    """Rounds after the last checkpoint are repeated, and may have other scores then: noise does not repeat."""
    row_of, scores = session.round_row, {}

    def scored(log, *words):
        return row_of(log, *words) | {"mean_validation_accuracy": scores.get(log.round, 0.1)}

    monkeypatch.setattr(session, "round_row", scored)
    experiment = small_experiment(tmp_path, "copa", train={"rounds": 4}, run={"checkpoint_every": 2})
    scores |= {2: 0.5} | first
    with pytest.raises(KeyboardInterrupt):
        run_small(experiment, Interrupt(3))
    folder = resolve(experiment).folder
    assert round_of(folder / "best.safetensors") == ("1" if 1 in first else "2")  # as round 2 was saved
    scores.clear()
    scores |= again
    run_small(experiment)
    assert pd.read_csv(folder / "summary.csv")["best_validation_round"][0] == best
    assert round_of(folder / "best.safetensors") == str(best)
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
