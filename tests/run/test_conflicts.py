"""A folder that holds a run is neither continued nor taken as the result when it was asked for something else."""

import logging

import pytest
from image_trees import write_tree
from support import Interrupt, run_small, small_experiment

from fedsim.commands.runs import run_one
from fedsim.common.errors import UserError
from fedsim.run.workspace import close_workspaces
from fedsim.runtime.launch import launch

DOMAINS = ("art", "cartoon", "photo", "sketch")
RUN = {"target": "sketch"}
OTHERS = {  # the rule that selects the round, and a domain that no client has
    "run.select_on": {"run": {**RUN, "select_on": "local"}},
    "run.validation_domain": {"run": {**RUN, "validation_domain": "photo"}},
    "train.lr": {"train": {"rounds": 2, "lr": 0.5}},
}


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """asked(output, **sections) is a short run on a tree of four domains of 24 images each."""
    root = write_tree(tmp_path_factory.mktemp("tree"), DOMAINS, ("cat", "dog"), 12)
    data = {"dataset": "folder", "root": str(root), "domains": list(DOMAINS), "fraction": 1, "image_size": 28}

    def make(output, **sections):
        return small_experiment(output, **{"data": data, "run": RUN, "train": {"rounds": 2}, **sections})

    return make


@pytest.mark.parametrize("key", OTHERS)
@pytest.mark.parametrize("call", [launch, run_one], ids=["launch", "run"])
def test_a_finished_run_is_not_the_result_of_other_settings(key, call, asked, tmp_path):
    """Neither for `fedsim run` nor for `launch`, which `flwr run` and programs use."""
    launch(asked(tmp_path))
    close_workspaces()
    with pytest.raises(UserError, match=f"holds a run with other settings \\({key}\\)"):
        call(asked(tmp_path, **OTHERS[key]))


@pytest.mark.parametrize("key", OTHERS)
def test_an_unfinished_run_is_not_continued_with_other_settings(key, asked, tmp_path):
    """With another domain held out, the model would have been trained on the domain that selects its round."""
    with pytest.raises(KeyboardInterrupt):
        run_small(asked(tmp_path), Interrupt(1))
    close_workspaces()
    with pytest.raises(UserError, match=f"holds a run with other settings \\({key}\\)"):
        launch(asked(tmp_path, **OTHERS[key]))


def test_a_finished_run_is_said(asked, tmp_path, caplog):
    """Nothing runs, and a program that asked for it learns why."""
    folder = launch(asked(tmp_path))
    close_workspaces()
    with caplog.at_level(logging.INFO, "fedsim"):
        assert launch(asked(tmp_path)) == folder
    assert f"already finished: {folder}" in caplog.text
