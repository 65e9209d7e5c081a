"""A run is not resumed when its records lack rows or another program has changed their form."""

import shutil

import pytest
from support import Interrupt, run_small, small_experiment

from fedsim.common.errors import UserError
from fedsim.run.plan import run_folder

SETTINGS = {"train": {"rounds": 5}, "run": {"checkpoint_every": 2}}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The output of a run that was stopped after round 3; its checkpoint is of round 2."""
    output = tmp_path_factory.mktemp("stopped")
    with pytest.raises(KeyboardInterrupt):
        run_small(small_experiment(output, "fedavg", **SETTINGS), Interrupt(3))
    return output


def without(*rounds):
    return lambda text: "".join(line for line in text.splitlines(keepends=True) if line.split(",")[0] not in rounds)


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("rounds.csv", lambda text: f"\ufeff{text}", "first column is not called round"),
        ("rounds.csv", lambda text: text.replace(",", ";"), "first column is not called round"),
        ("rounds.csv", lambda text: text.replace("0.", "0,"), "round 0 has cells that are not numbers"),
        ("rounds.csv", lambda text: text.replace("\n2,", "\n2.0,"), "'2.0' is not the number of a round"),
        ("rounds.csv", without("1"), "no row of round 1, but the run has a checkpoint of round 2"),
        ("rounds.csv", lambda text: "", "no row of round 0"),
        ("rounds.csv", None, "no row of round 0"),
        ("clients.csv", lambda text: f"\ufeff{text}", "first column is not called round"),
        ("clients.csv", without("2", "3"), "no row of round 2"),
        ("clients.csv", None, "no row of round 1"),
    ],
)
def test_a_changed_file_is_named(file, change, said, stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    experiment = small_experiment(tmp_path, "fedavg", **SETTINGS)
    record = run_folder(experiment) / file
    changed = change(record.read_text(encoding="utf-8")) if change else None
    record.unlink() if changed is None else record.write_text(changed, encoding="utf-8")
    with pytest.raises(UserError, match=rf"{file}: .*{said}.*remove the run's folder") as error:
        run_small(experiment)
    assert "\n" not in str(error.value)
    assert (record.read_text(encoding="utf-8") if record.is_file() else None) == changed


def test_a_file_in_another_encoding_is_named(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    experiment = small_experiment(tmp_path, "fedavg", **SETTINGS)
    record = run_folder(experiment) / "rounds.csv"
    record.write_bytes(changed := record.read_text().encode("utf-16"))
    with pytest.raises(UserError, match=r"rounds\.csv: it is not text in UTF-8"):
        run_small(experiment)
    assert record.read_bytes() == changed
