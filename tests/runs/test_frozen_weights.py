"""Frozen and initial weights are in no file of a run: it records their hash, and later ones are compared with it."""

import json

import pytest
import torch
from support import interrupt, run_small, tiny_experiment

import fedsim
from fedsim.analysis import compare
from fedsim.common.errors import UserError
from fedsim.export.features import domain_features
from fedsim.models import build_model
from fedsim.records import read_runs
from fedsim.runs.conflicts import refuse_other_settings
from fedsim.runs.plan import resolve
from fedsim.runs.workspace import Workspace, close_workspaces
from fedsim.settings import ModelSettings
from fedsim.settings.paths import with_absolute_weights


def write_weights(file, seed):
    """A weights file of the digits CNN, another one for every seed; a new process reads it."""
    net = build_model(ModelSettings(backbone="digits-cnn-bn"), 10, 1, 28, seed=seed)
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean += seed / 10
    torch.save(net.backbone.state_dict(), file)
    close_workspaces()


def linear_probe(folder):
    return tiny_experiment(folder / "outputs", model={"weights": str(folder / "own.pth"), "train": "head"})


def test_a_run_is_not_resumed_or_loaded_with_other_frozen_weights(tmp_path):
    """It was stopped after its first round; then another file came to the same path."""
    write_weights(tmp_path / "own.pth", 1)
    stopped = linear_probe(tmp_path)
    interrupt(stopped, 1)
    write_weights(tmp_path / "own.pth", 2)
    with pytest.raises(UserError, match=r"began with another file '.*own.pth'"):
        run_small(stopped)
    write_weights(tmp_path / "own.pth", 1)
    folder, _ = run_small(stopped)
    last = folder / "last.safetensors"
    assert fedsim.load(folder, "last").remark == ""
    domain_features(stopped, last, 5)
    write_weights(tmp_path / "own.pth", 2)
    words = r"with other frozen weights: model.weights = '.*own.pth' gives others now; put back"
    for read in (lambda: fedsim.load(folder, "last"), lambda: domain_features(stopped, last, 5)):
        with pytest.raises(UserError, match=words):
            read()


def trained_whole(folder, method="fedavg"):
    return tiny_experiment(folder / "outputs", method, 1, model={"weights": str(folder / "own.pth")})


def test_another_file_of_initial_weights_is_another_run(tmp_path):
    """A stopped run does not go on, a finished one does not count as done, and runs are not compared."""
    write_weights(tmp_path / "own.pth", 1)
    folder, _ = run_small(trained_whole(tmp_path))
    assert "frozen" not in json.loads((folder / "environment.json").read_text())
    interrupt(trained_whole(tmp_path, "fedprox"), 0)
    write_weights(tmp_path / "own.pth", 2)
    plan = resolve(trained_whole(tmp_path))
    again = (plan.folder, plan.experiment, plan.recipe)
    for refused in (lambda: refuse_other_settings(*again), lambda: run_small(trained_whole(tmp_path, "fedprox"))):
        with pytest.raises(UserError, match=r"holds a run that began with another file '.*own.pth'"):
            refused()
    run_small(trained_whole(tmp_path, "fedsr"))
    with pytest.raises(UserError, match=r"'.*own.pth' in .* and in .*, but the file was another one"):
        compare(read_runs(tmp_path / "outputs" / "small"))
    record = json.loads((folder / "environment.json").read_text())
    assert len(record.pop("weights")) == 20  # an earlier version did not write it; nothing is compared then
    (folder / "environment.json").write_text(json.dumps(record))
    refuse_other_settings(*again)
    compare(read_runs(tmp_path / "outputs" / "small"))


def test_a_site_begins_with_the_personal_tensors_of_the_server(tmp_path):
    """FedBN's never travel, so that they are compared in the handshake when they come from a file."""
    contents = {}
    for seed in (1, 2):
        write_weights(tmp_path / "own.pth", seed)
        for method in ("fedavg", "fedbn"):
            contents[method, seed] = Workspace(resolve(trained_whole(tmp_path, method))).frozen_content
    assert contents["fedavg", 1] == contents["fedavg", 2] == ""
    assert (len(contents["fedbn", 1]), contents["fedbn", 1] == contents["fedbn", 2]) == (20, False)
    assert Workspace(resolve(tiny_experiment(tmp_path, "fedbn"))).frozen_content == ""


def test_the_runtime_flower_names_the_file_by_its_whole_path(tmp_path, monkeypatch):
    """Its processes have another working folder. The run is still the same one."""
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / "own.pth", 1)
    given = tiny_experiment("outputs", model={"weights": "own.pth"})
    sent = with_absolute_weights(given)
    assert sent.model.weights == str(tmp_path / "own.pth")
    assert with_absolute_weights(tiny_experiment("outputs")).model.weights == "none"
    plan = resolve(sent)
    plan.folder.mkdir(parents=True)
    (plan.folder / "experiment.toml").write_text(plan.experiment.toml())
    refuse_other_settings(plan.folder, resolve(given).experiment, plan.recipe)
