"""A folder that holds a run is neither continued nor taken as the result when it was asked for something else."""

import logging

import pytest
from image_trees import write_tree
from support import Interrupt, run_small, small_experiment

from fedsim.commands.runs import run_one
from fedsim.common.errors import UserError
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
