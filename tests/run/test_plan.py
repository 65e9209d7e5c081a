"""A run is resolved once in a process, and passed on."""

import pytest
from support import numbers, run_small, small_experiment

import fedsim.methods.assembly
import fedsim.run.plan
from fedsim.common.errors import UserError
from fedsim.run.plan import resolve
from fedsim.run.workspace import close_workspaces, open_workspace, workspace
from fedsim.runtime.launch import launch
from fedsim.settings.experiment import Experiment, read_experiment


@pytest.fixture
def calls(monkeypatch):
    """Counts how often recipes and networks are built, by any caller."""
    counts = {"build_recipe": 0, "build_model": 0}

    def counted(module, name):
        real = getattr(module, name)

        def call(*args, **kwargs):
            counts[name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    counted(fedsim.run.plan, "build_recipe")
    counted(fedsim.methods.assembly, "build_model")
    close_workspaces()
    return counts


def test_a_run_of_three_clients_builds_one_recipe_and_one_network(calls, tmp_path):
    launch(small_experiment(tmp_path, train={"rounds": 1}))
    assert calls == {"build_recipe": 1, "build_model": 1}


def test_a_command_that_runs_resolves_once(calls, tmp_path, monkeypatch):
    from fedsim.commands.runs import run_one

    run_one(small_experiment(tmp_path, train={"rounds": 1}))
    assert calls == {"build_recipe": 1, "build_model": 1}
    run_one(small_experiment(tmp_path, train={"rounds": 1}))  # already finished: no network
    assert calls == {"build_recipe": 2, "build_model": 1}


def test_a_plan_makes_the_name_of_its_folder_once(tmp_path, monkeypatch):
    """Planning a sweep asks for it three times per cell."""
    real, asked = fedsim.run.plan.method_label, []
    monkeypatch.setattr(fedsim.run.plan, "method_label", lambda experiment: asked.append(1) or real(experiment))
    plan = resolve(small_experiment(tmp_path))
    assert plan.folder == plan.folder == tmp_path / "small" / "fedavg" / "rot45" / "seed0"
    assert len(asked) == 1


def test_nobody_else_builds_recipes_of_a_run():
    from pathlib import Path

    root = Path(fedsim.__file__).parent
    users = {file.relative_to(root).as_posix() for file in root.rglob("*.py") if "build_recipe(" in file.read_text()}
    # These modules make plans, define the function, or need methods without a run (a report's notes, saved models).
    assert users <= {"run/plan.py", "methods/assembly.py", "commands/results.py", "export/features.py"}


@pytest.mark.parametrize("method", ["fedbn", "fedig-a", "csac", "feddg-ga+gperxan"])
def test_server_and_clients_share_a_network_without_touching_each_other(method, tmp_path):
    """Separate networks, one per client and one for the server's evaluation, give the same numbers."""
    from support import SpyGrid

    from fedsim.client_app import app
    from fedsim.server_app import serve

    shared, _ = run_small(small_experiment(tmp_path / "shared", method))
    plan = resolve(small_experiment(tmp_path / "apart", method))

    class Apart(SpyGrid):
        spaces: dict = {}

        def deliver(self, messages):
            from fedsim.run import workspace as module

            for message in messages:
                node = message.metadata.dst_node_id
                server, module._open = module._open, self.spaces.setdefault(node, {})
                reply = app(message, self.contexts[node])
                module._open = server
                yield reply

    apart = serve(Apart(len(plan.clients)), plan)
    assert numbers(shared / "rounds.csv").equals(numbers(apart / "rounds.csv"))


def test_a_plan_knows_its_folder_clients_and_data(tmp_path):
    plan = resolve(small_experiment(tmp_path))
    assert plan.clients == ("rot0", "rot15", "rot30")
    assert plan.folder == tmp_path / "small" / "fedavg" / "rot45" / "seed0"
    assert plan.data.domains == ("rot0", "rot15", "rot30", "rot45")
    assert resolve(small_experiment(tmp_path, "deepall")).clients == ("pooled",)
    assert resolve(Experiment()).experiment.run.target == "rot75"  # the last domain, filled in
    with pytest.raises(UserError, match="no domain 'rot4'"):
        resolve(Experiment().replace(run={"target": "rot4"}))


def test_clients_find_the_workspace_that_the_server_opened(tmp_path):
    close_workspaces()
    plan = resolve(small_experiment(tmp_path))
    space = open_workspace(plan)
    assert workspace(plan.experiment.toml()) is space
    again = open_workspace(plan)  # another run, from the initial network
    assert workspace(plan.experiment.toml()) is again is not space


def test_the_images_take_the_size_of_the_weights():
    for backbone, size in (("resnet18", 224), ("timm:tf_efficientnet_lite2", 260)):
        asked = read_experiment("digits", ["data.image_size=0", f"model.backbone={backbone}"])
        plan = resolve(asked)
        assert plan.experiment.data.image_size == size  # and so it is recorded, compared and sent to the sites
        assert resolve(plan.experiment).experiment == plan.experiment
    with pytest.raises(UserError, match=r"data.image_size is 0.*digits-cnn-bn has no such weights: name a size"):
        resolve(read_experiment("digits", ["data.image_size=0"]))
    for size in (-1, 7, 1025):
        with pytest.raises(UserError, match=r"data\.image_size"):
            read_experiment("digits", [f"data.image_size={size}"])
