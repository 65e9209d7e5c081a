"""Frozen weights are in no file of a run: it records their hash, and later ones are compared with it."""

import json

import pytest
import torch
from support import Interrupt, run_small, small_experiment

import fedsim
from fedsim.errors import UserError
from fedsim.models import build_model
from fedsim.models.clip_family import TextHead
from fedsim.results.features import domain_features
from fedsim.run.frozen import frozen_record
from fedsim.run.plan import resolve
from fedsim.run.workspace import close_workspaces
from fedsim.settings import ModelSettings


def write_weights(file, seed):
    """A weights file of the digits CNN; every seed gives another one."""
    net = build_model(ModelSettings(backbone="digits-cnn-bn"), 10, 1, 28, seed=seed)
    torch.save(net.backbone.state_dict(), file)


def linear_probe(folder):
    """An experiment that trains the head on top of the backbone in that folder's weights file."""
    model = {"weights": str(folder / "own.pth"), "train": "head"}
    return small_experiment(folder / "outputs", model=model, train={"rounds": 2})


@pytest.fixture
def stopped(tmp_path):
    """A run that was stopped after its first round; then another file came to the same path."""
    write_weights(tmp_path / "own.pth", 1)
    close_workspaces()
    with pytest.raises(KeyboardInterrupt):
        run_small(linear_probe(tmp_path), Interrupt(1))
    close_workspaces()
    write_weights(tmp_path / "own.pth", 2)
    return linear_probe(tmp_path)


def test_a_run_is_not_resumed_or_loaded_with_other_frozen_weights(stopped, tmp_path):
    """The refusals are one line that names the setting; with the old file everything goes on."""
    words = r"with other frozen weights: model.weights = '.*own.pth' gives others now; put back"
    with pytest.raises(UserError, match=words) as refused:
        run_small(stopped)
    assert "\n" not in str(refused.value)
    close_workspaces()
    write_weights(tmp_path / "own.pth", 1)
    folder, _ = run_small(stopped)
    close_workspaces()
    assert fedsim.load(folder, "last").remark == ""
    domain_features(stopped, folder / "last.safetensors", 5)
    write_weights(tmp_path / "own.pth", 2)
    for read in (lambda: fedsim.load(folder, "last"), lambda: domain_features(stopped, folder / "last.safetensors", 5)):
        with pytest.raises(UserError, match=words):
            read()


def test_a_run_of_an_earlier_version_goes_on(stopped):
    """It did not record its frozen weights, so that they cannot be compared."""
    file = resolve(stopped).folder / "environment.json"
    record = json.loads(file.read_text())
    assert len(record.pop("frozen")) == 20
    file.write_text(json.dumps(record))
    folder, _ = run_small(stopped)
    fedsim.load(folder, "last")


def test_without_frozen_weights_nothing_is_recorded(tmp_path):
    folder, _ = run_small(small_experiment(tmp_path, train={"rounds": 1}))
    assert "frozen" not in json.loads((folder / "environment.json").read_text())


def test_computed_texts_are_not_compared():
    """Another processor may round them differently; the backbone's tensors are compared."""
    net = build_model(ModelSettings(backbone="digits-cnn-bn", train="head"), 10, 1, 28)
    before = frozen_record(net)
    net.head = TextHead(torch.rand(10, 50), 100.0)
    net.frozen |= {"head.text", "head.scale"}
    assert frozen_record(net) == before
    net.backbone.conv1.weight.data[0] += 1e-6
    assert frozen_record(net) != before
