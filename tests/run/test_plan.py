"""A run is resolved once in a process, and passed on."""

from functools import partial
from pathlib import Path

import pytest
from support import small_experiment, tiny_experiment

import fedsim.methods.assembly
import fedsim.run.admission
import fedsim.run.plan
from fedsim.commands.runs import run_one
from fedsim.common.errors import UserError
from fedsim.run.plan import resolve
from fedsim.run.workspace import close_workspaces, open_workspace, workspace
from fedsim.settings.experiment import Experiment, read_experiment

COUNTED = {
    fedsim.run.plan: ["build_recipe", "method_label"],
    fedsim.methods.assembly: ["build_model"],
    fedsim.run.admission: ["check_processes", "find_data", "check_partitions", "data_here", "refuse_other_settings"],
}


def test_a_run_is_resolved_once_and_each_check_is_called_once(tmp_path, monkeypatch):
    """Three clients share one recipe and one network; a finished run is only compared."""
    counts = {name: 0 for names in COUNTED.values() for name in names}

    def counted(name, real, *given):
        counts[name] += 1
        return real(*given)

    for module, names in COUNTED.items():
        for name in names:
            monkeypatch.setattr(module, name, partial(counted, name, getattr(module, name)))
    close_workspaces()
    run_one(tiny_experiment(tmp_path, rounds=1))
    assert counts == dict.fromkeys(counts, 1)
    run_one(tiny_experiment(tmp_path, rounds=1))
    twice = ["build_recipe", "method_label", "refuse_other_settings"]
    assert counts == dict.fromkeys(counts, 1) | dict.fromkeys(twice, 2)


def test_nobody_else_builds_recipes_of_a_run():
    root = Path(fedsim.__file__).parent
    users = {file.relative_to(root).as_posix() for file in root.rglob("*.py") if "build_recipe(" in file.read_text()}
    # These modules make plans, define the function, or need methods without a run (a report's notes, saved models).
    assert users <= {
        "run/plan.py",
        "methods/assembly.py",
        "commands/results.py",
        "export/features.py",
        "sweep/search_space.py",
    }


def test_a_plan_knows_its_folder_clients_and_data(tmp_path):
    """Clients find the workspace that the server opened for the plan."""
    plan = resolve(small_experiment(tmp_path))
    assert plan.clients == ("rot0", "rot15", "rot30")
    assert plan.folder == tmp_path / "small" / "fedavg" / "rot45" / "seed0"
    assert plan.data.domains == ("rot0", "rot15", "rot30", "rot45")
    assert resolve(small_experiment(tmp_path, "deepall")).clients == ("pooled",)
    assert resolve(Experiment()).experiment.run.target == "rot75"  # the last domain, filled in
    with pytest.raises(UserError, match="no domain 'rot4'"):
        resolve(Experiment().replace(run={"target": "rot4"}))
    space = open_workspace(plan)
    assert workspace(plan.experiment.toml()) is space
    again = open_workspace(plan)  # another run, from the initial network
    assert workspace(plan.experiment.toml()) is again is not space


def test_the_images_take_the_size_of_the_weights():
    """timm's models as well, see tests/models."""
    plan = resolve(read_experiment("digits", ["data.image_size=0", "model.backbone=resnet18"]))
    assert plan.experiment.data.image_size == 224  # and so it is recorded, compared and sent to the sites
    assert resolve(plan.experiment).experiment == plan.experiment
    with pytest.raises(UserError, match=r"data.image_size is 0.*digits-cnn-bn has no such weights: name a size"):
        resolve(read_experiment("digits", ["data.image_size=0"]))
    for size in (-1, 7, 1025):
        with pytest.raises(UserError, match=r"data\.image_size"):
            read_experiment("digits", [f"data.image_size={size}"])
