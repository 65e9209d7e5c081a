"""Checkpoint files are complete or absent, and nothing is left of an interrupted attempt."""

import numpy as np
import pytest

from fedsim.common.files import atomic_write, file_mode
from fedsim.run.checkpoint import link_file, unfinished, write_arrays


@pytest.fixture
def saved(tmp_path):
    write_arrays(tmp_path / "arrays.safetensors", {"w": np.arange(3.0)})
    return tmp_path / "arrays.safetensors"


@pytest.mark.parametrize("killed", [False, True])
def test_a_link_made_again_leaves_nothing_else(saved, killed):
    """A resumed run creates the link to its best model again, perhaps to the same file."""
    best = saved.with_name("best.safetensors")
    for _ in range(2):
        if killed:
            unfinished(saved).write_bytes(b"cut")
            unfinished(best).write_bytes(b"cut")
            write_arrays(saved, {"w": np.zeros(2)})
        link_file(saved, best)
        assert {file.name for file in saved.parent.iterdir()} == {saved.name, best.name}
        assert best.read_bytes() == saved.read_bytes()


def test_models_are_as_readable_as_the_records(tmp_path):
    """safetensors itself would create files that other users cannot read."""
    atomic_write(tmp_path / "summary.csv", "a\n")
    write_arrays(tmp_path / "best.safetensors", {"w": np.zeros(2, np.float32)})
    (tmp_path / "rounds.csv").write_text("a\n")
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {file_mode()}
