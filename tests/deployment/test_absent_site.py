"""A run that went on without a site which never came."""

import json

from image_trees import write_tree
from sites import site_grid
from support import small_experiment

import fedsim
from fedsim.run.plan import resolve
from fedsim.run.serve import serve
from fedsim.run.workspace import close_workspaces

PATIENT = {"runtime": "deployment", "on_client_failure": "continue", "wait_for_sites": 0.1, "patience": 0.0}


def test_its_model_is_loaded_for_all_clients_of_the_run(tmp_path):
    """The server never saw the site's data, but the network has a key for its client."""
    root = write_tree(tmp_path / "images", ["a", "b", "t"], ["cat", "dog"], 4)
    data = {"dataset": "folder", "domains": ["a", "b", "t"], "classes": ["cat", "dog"], "root": str(root)}
    experiment = small_experiment(
        tmp_path,
        "fedapt",
        data={**data, "cache": str(tmp_path / "cache"), "image_size": 16, "fraction": 1.0},
        model={"backbone": "tiny-clip", "head": "text", "train": "head"},
        train={"rounds": 1, "batch_size": 4},
        run={"target": "t", "evaluate_target": "site", **PATIENT},
    )
    grid = site_grid(experiment, tmp_path / "state")
    there = [node for node in grid.node_ids if grid.contexts[node].node_config["domain"] != "b"]
    grid.get_node_ids = lambda: there
    for context in grid.contexts.values():
        context.node_config["data-dir"] = str(root)
    close_workspaces()
    folder = serve(grid, resolve(experiment))
    close_workspaces()
    recorded = json.loads((folder / "environment.json").read_text())
    assert sorted(recorded["data"]) == ["a", "t"]
    model = fedsim.load(folder, "last")
    assert model.plan.clients == ("a", "b")
    assert len(model.net.head.keys) == 2
    assert recorded["domains"] == ["a", "b", "t"]
