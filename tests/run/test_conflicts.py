"""A folder that holds a run with other settings, or with changed records, is neither continued nor the result."""

import logging
import shutil

import pytest
from image_trees import write_tree
from support import Interrupt, run_small, small_experiment, tiny_experiment

from fedsim.commands.runs import run_one
from fedsim.common.errors import UserError
from fedsim.run.plan import run_folder
from fedsim.run.workspace import close_workspaces
from fedsim.runtime.launch import launch

RUN = {"target": "sketch"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """asked(state, **sections): a short run on a tree of four domains of 24 images each, finished or stopped before."""
    place = tmp_path_factory.mktemp("conflicts")
    root = write_tree(place / "tree", ("art", "cartoon", "photo", "sketch"), ("cat", "dog"), 12)
    data = {"dataset": "folder", "root": str(root), "domains": [], "fraction": 1, "image_size": 28}

    def asked(state, **sections):
        given = {"data": data, "run": RUN, "train": {"rounds": 2, "iterations": 1}, **sections}
        return small_experiment(place / state, **given)

    launch(asked("finished"))
    with pytest.raises(KeyboardInterrupt):
        run_small(asked("stopped"), Interrupt(1))
    return asked


@pytest.fixture(autouse=True)
def _new_process():
    close_workspaces()


@pytest.mark.parametrize(("key", "sections"), [  # the rule that selects the round; a domain that no client has
    ("run.select_on", {"run": {**RUN, "select_on": "local"}}),
    ("run.validation_domain", {"run": {**RUN, "validation_domain": "photo"}}),
    ("train.lr", {"train": {"rounds": 2, "iterations": 1, "lr": 0.5}}),
])  # fmt: skip
@pytest.mark.parametrize(("state", "call"), [("finished", launch), ("finished", run_one), ("stopped", launch)])
def test_a_run_with_other_settings_is_neither_the_result_nor_continued(key, sections, state, call, folders, caplog):
    """Neither for `fedsim run` nor for `launch`; another held-out domain may be one on which the model was trained."""
    with pytest.raises(UserError, match=f"holds a run with other settings \\({key}\\)"):
        call(folders(state, **sections))
    if state == "finished" and call is launch:
        with caplog.at_level(logging.INFO, "fedsim"):
            folder = launch(folders("finished"))
        assert f"already finished: {folder}" in caplog.text


def five_rounds(output):
    return tiny_experiment(output, rounds=5, run={"checkpoint_every": 2})


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The output of a run that was stopped after round 3; its checkpoint is of round 2."""
    output = tmp_path_factory.mktemp("stopped")
    with pytest.raises(KeyboardInterrupt):
        run_small(five_rounds(output), Interrupt(3))
    return output


def without(*rounds):
    return lambda text: "".join(line for line in text.splitlines(keepends=True) if line.split(",")[0] not in rounds)


@pytest.mark.parametrize(("file", "change", "said"), [
    ("rounds.csv", lambda text: f"\ufeff{text}", "first column is not called round"),
    ("rounds.csv", lambda text: text.replace("0.", "0,"), "round 0 has cells that are not numbers"),
    ("rounds.csv", lambda text: text.replace("\n2,", "\n2.0,"), "'2.0' is not the number of a round"),
    ("rounds.csv", lambda text: text.encode("utf-16"), "it is not text in UTF-8"),
    ("rounds.csv", without("1"), "no row of round 1, but the run has a checkpoint of round 2"),
    ("rounds.csv", lambda text: "", "no row of round 0"),
    ("rounds.csv", None, "no row of round 0"),
    ("clients.csv", without("2", "3"), "no row of round 2"),
    ("clients.csv", None, "no row of round 1"),
])  # fmt: skip
def test_a_changed_file_is_named(file, change, said, stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    record = run_folder(five_rounds(tmp_path)) / file
    changed = change(record.read_text(encoding="utf-8")) if change else None
    changed = changed.encode() if isinstance(changed, str) else changed
    record.unlink() if changed is None else record.write_bytes(changed)
    with pytest.raises(UserError, match=rf"{file}: .*{said}") as error:
        run_small(five_rounds(tmp_path))
    assert "\n" not in str(error.value)
    assert "remove the run's folder" in str(error.value) or "UTF-8" in said
    assert (record.read_bytes() if record.is_file() else None) == changed
