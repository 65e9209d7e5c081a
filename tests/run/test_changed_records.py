"""A run is not resumed when its records lack rows or another program has changed their form."""

import shutil

import pytest
from support import Interrupt, run_small, tiny_experiment

from fedsim.common.errors import UserError
from fedsim.run.plan import run_folder


def experiment(output):
    return tiny_experiment(output, rounds=5, run={"checkpoint_every": 2})


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The output of a run that was stopped after round 3; its checkpoint is of round 2."""
    output = tmp_path_factory.mktemp("stopped")
    with pytest.raises(KeyboardInterrupt):
        run_small(experiment(output), Interrupt(3))
    return output


def without(*rounds):
    return lambda text: "".join(line for line in text.splitlines(keepends=True) if line.split(",")[0] not in rounds)


@pytest.mark.parametrize(("file", "change", "said"), [
    ("rounds.csv", lambda text: f"\ufeff{text}", "first column is not called round"),
    ("rounds.csv", lambda text: text.replace(",", ";"), "first column is not called round"),
    ("rounds.csv", lambda text: text.replace("0.", "0,"), "round 0 has cells that are not numbers"),
    ("rounds.csv", lambda text: text.replace("\n2,", "\n2.0,"), "'2.0' is not the number of a round"),
    ("rounds.csv", lambda text: text.encode("utf-16"), "it is not text in UTF-8"),
    ("rounds.csv", without("1"), "no row of round 1, but the run has a checkpoint of round 2"),
    ("rounds.csv", lambda text: "", "no row of round 0"),
    ("rounds.csv", None, "no row of round 0"),
    ("clients.csv", lambda text: f"\ufeff{text}", "first column is not called round"),
    ("clients.csv", without("2", "3"), "no row of round 2"),
    ("clients.csv", None, "no row of round 1"),
])  # fmt: skip
def test_a_changed_file_is_named(file, change, said, stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    record = run_folder(experiment(tmp_path)) / file
    changed = change(record.read_text(encoding="utf-8")) if change else None
    changed = changed.encode() if isinstance(changed, str) else changed
    record.unlink() if changed is None else record.write_bytes(changed)
    with pytest.raises(UserError, match=rf"{file}: .*{said}") as error:
        run_small(experiment(tmp_path))
    assert "\n" not in str(error.value)
    assert "remove the run's folder" in str(error.value) or "UTF-8" in said
    assert (record.read_bytes() if record.is_file() else None) == changed
