"""Images on a site change: between two runs of one process, or while a run is going on."""

import json

import numpy as np
import pytest
from image_trees import _write_image, write_tree
from sites import site_grid
from support import numbers, small_experiment

import fedsim.server_app
from fedsim.run.plan import resolve
from fedsim.run.workspace import close_workspaces, workspace
from fedsim.server_app import serve


@pytest.fixture
def federation(tmp_path, monkeypatch):
    """run(name, *callbacks) -> the run's folder; three sites with images of their own, four of each class."""
    data = write_tree(tmp_path / "images", ["a", "b", "c"], ["cat", "dog"], 4)
    sent = fedsim.server_app.sent_settings
    blank = {"run": {"output": "outputs"}}  # as in a deployment: two runs send the same settings
    monkeypatch.setattr(
        fedsim.server_app, "sent_settings", lambda experiment, *rest: sent(experiment.replace(**blank), *rest)
    )

    def experiment(method="fedavg", name="run", rounds=1, **run):
        folders = {"root": str(data), "cache": str(tmp_path / "cache")}
        facts = {"dataset": "folder", "domains": ["a", "b", "c"], "classes": ["cat", "dog"]}
        sections = {
            "data": {**folders, **facts, "image_size": 16, "fraction": 1.0},
            "train": {"rounds": rounds, "batch_size": 4},
            "run": {"target": "c", "evaluate_target": "site", **run},
        }
        return small_experiment(tmp_path / name, method, **sections)

    def run(name, *callbacks, tamper=None, **words):
        experiment = run.experiment(name=name, **words)
        grid = site_grid(experiment, tmp_path / "state", tamper=tamper)
        for context in grid.contexts.values():
            context.node_config["data-dir"] = str(data)
        return serve(grid, resolve(experiment), callbacks)

    run.data, run.experiment = data, experiment
    close_workspaces()
    return run


def change(folder, seed=9000):
    """Gives every image of a domain other pixels under the same name."""
    for index, file in enumerate(sorted(folder.rglob("*.png"))):
        _write_image(file, seed + index)


def losses(folder):
    return list(numbers(folder / "rounds.csv")["target_loss"])


def content(folder, domain):
    return json.loads((folder / "environment.json").read_text())["data"][domain]["content"]


def test_a_new_run_sees_the_images_of_now(federation):
    """The process of a site stays warm between the runs, and the settings that it is sent are the same."""
    before = federation("before")
    change(federation.data / "c")
    warm = federation("warm")
    close_workspaces()
    fresh = federation("fresh")
    assert content(warm, "c") == content(fresh, "c") != content(before, "c")
    assert losses(warm) == losses(fresh) != losses(before)


def test_a_new_run_adapts_to_the_images_of_now(federation):
    """The unlabelled images of the unseen domain stay in memory for one run."""
    space = workspace(federation.experiment("fada").toml())
    first = space.unlabelled("first")
    change(federation.data / "c")
    assert space.unlabelled("first") is first
    assert not np.array_equal(space.unlabelled("second").data.images, first.data.images)
