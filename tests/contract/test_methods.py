"""Every row of METHODS keeps the same promises. A new method is a new row here by itself, not a new test file."""

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import Interrupt, numbers, run_small, small_experiment

from fedsim.arrays import record_to_arrays
from fedsim.methods import METHODS
from fedsim.run.workspace import close_workspaces, workspace

COMBINATIONS = ["gperxan+feddg-ga", "fedprox+fedbn", "feddg-ga+fedprox"]


def train_messages(grid, phase="train"):
    """(config, message, reply) of the training messages of a phase."""
    for message, reply in grid.seen:
        config = message.content.config_records["config"]
        if message.metadata.message_type == "train" and config["phase"] == phase:
            yield config, message, reply


@pytest.mark.parametrize("method", [*METHODS, *COMBINATIONS])
def test_contract(method, tmp_path):
    """Three rounds: finite, moving, reproducible, resumable, and the share rule holds on the wire."""
    experiment = small_experiment(tmp_path / "a", method)
    initial = {key: value.clone() for key, value in workspace(experiment.toml()).net.state_dict().items()}
    folder, grid = run_small(experiment)

    rounds = numbers(folder / "rounds.csv")
    assert list(rounds["round"]) == [0, 1, 2, 3]
    assert np.isfinite(rounds["train_loss"].iloc[1:]).all()
    last = load_file(folder / "last.safetensors")
    moved = [
        key for key, value in last.items() if value.dtype == np.float32 and not np.array_equal(value, initial[key])
    ]
    assert len(moved) > len(last) / 2
    check_share_rule(experiment, grid)

    again = small_experiment(tmp_path / "b", method)
    with pytest.raises(KeyboardInterrupt):
        run_small(again, Interrupt(after_round=2))
    close_workspaces()  # a resumed run is a new process
    resumed, _ = run_small(again)
    assert numbers(resumed / "rounds.csv").equals(rounds)
    assert numbers(resumed / "clients.csv").equals(numbers(folder / "clients.csv"))
    np.testing.assert_equal(load_file(resumed / "last.safetensors"), last)


def check_share_rule(experiment, grid):
    """Only shared tensors go down for training, no local tensor ever travels, the unseen domain is never named."""
    places = workspace(experiment.toml()).places
    shared = {name for name, place in places.items() if place == "shared"}
    uploaded = {name for name, place in places.items() if place != "local"}
    count = 0
    for config, message, reply in train_messages(grid):
        assert set(message.content.array_records["arrays"]) == shared
        assert set(record_to_arrays(reply.content.array_records["arrays"])) == uploaded
        assert config["client"] != experiment.run.target
        count += 1
    assert count == 3 * len({config["client"] for config, _, _ in train_messages(grid)})


def test_rows_are_immutable_and_print_their_settings():
    """A recipe can be shown and compared: parts are frozen dataclasses with readable reprs."""
    for name, recipe in METHODS.items():
        assert recipe == METHODS[name]
        assert "object at" not in repr(recipe)
        assert recipe.paper
        assert recipe.discloses
