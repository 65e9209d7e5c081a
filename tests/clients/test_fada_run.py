"""FADA in whole runs: its exchanges, what is marked in results, and what of the target is read."""

import dataclasses

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import numbers, run_small, small_experiment, tiny_experiment

import fedsim.data.loading as loading
from clients.unlabelled.adversarial_target import AdversarialTarget
from fedsim.common.errors import UserError
from fedsim.data.digits import Digits
from fedsim.methods.assembly import build_recipe
from fedsim.methods.compatibility import check_recipe
from fedsim.methods.table import METHODS
from fedsim.run.workspace import close_workspaces
from fedsim.tensors.arrays import record_to_arrays

SOURCES = ("rot0", "rot15", "rot30")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder, messages, experiment) of a complete run."""
    experiment = tiny_experiment(tmp_path_factory.mktemp("fada"), "fada", 3)
    return *run_small(experiment), experiment


def test_three_exchanges_a_round(run):
    """Kinds of messages, what they hold, and their bytes in clients.csv."""
    folder, grid, _ = run
    visits = [pair for pair in grid.seen if pair[0].metadata.message_type == "query.visit"]
    assert [message.content.config_records["config"]["phase"] for message, _ in visits] == ["attention", "adapt"] * 3
    held = [tuple(set(each.content.array_records) for each in pair) for pair in visits]
    assert held[0] == ({"arrays", *(f"candidate:000{place}" for place in range(3))}, {"tightness"})
    assert held[1][0] == {"arrays"}  # round 1: identifiers are not trained yet
    assert held[3] == ({"arrays", *(f"identifier:{n}" for n in SOURCES)}, {"generator", "target_features"})
    trains = [message for message, _ in grid.seen if message.metadata.message_type == "train"]
    assert ["target_features" in message.content.array_records for message in trains] == [False] * 3 + [True] * 6
    clients = numbers(folder / "clients.csv")
    assert clients.query("round > 0").groupby("round")["weight"].sum().tolist() == pytest.approx([1, 1, 1])
    target = clients.query("client == 'rot45' and round == 3").iloc[0]

    def bytes_of(message, record):
        return sum(array.nbytes for array in record_to_arrays(message.content.array_records[record]).values())

    size = sum(value.nbytes for value in load_file(folder / "last.safetensors").values())
    assert target["bytes_down"] == 5 * size + 3 * bytes_of(visits[3][0], "identifier:rot0")
    assert target["bytes_up_target_features"] == bytes_of(visits[3][1], "target_features")
    summary = numbers(folder / "summary.csv").iloc[0]
    assert summary["uses_target_unlabelled"]
    whole = loading.load_target(tiny_experiment(folder).data, "rot45")[2]
    assert 0.3 * len(whole) < summary["target_images"] < 0.7 * len(whole)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_tested_images_are_never_adapted_to(share, run):
    """The two parts of the target have no image in common; the target is asked for no label."""
    data = run[2].data.model_copy(update={"adapt_share": share})
    apart = loading.load_unlabelled(data, "rot45")
    assert not set(apart.train) & set(loading.load_target(data, "rot45")[2])
    assert (apart.labels == -1).all()


def test_labels_of_the_target_change_nothing(run, tmp_path, monkeypatch):
    """With permuted labels of the target, every tensor and all numbers but those of the test stay the same."""
    folder, _, experiment = run
    original = Digits.images

    def permuted(self, domain, apart=False):
        images, labels = original(self, domain, apart)
        return (images, np.random.default_rng(1).permutation(labels)) if domain == "rot45" else (images, labels)

    monkeypatch.setattr(Digits, "images", permuted)
    close_workspaces()
    other, _ = run_small(experiment.replace(run={"output": str(tmp_path)}))
    close_workspaces()
    assert (folder / "last.safetensors").read_bytes() == (other / "last.safetensors").read_bytes()
    assert numbers(folder / "clients.csv").equals(numbers(other / "clients.csv"))
    losses = [numbers(each / "rounds.csv")["target_loss"] for each in (folder, other)]
    assert not losses[0].equals(losses[1])


def test_a_target_that_fails(tmp_path, monkeypatch):
    """The run goes on with uniform weights and without target features; by default it stops with the reason."""

    def broken(self, round):
        raise UserError("the disk is full")

    monkeypatch.setattr(AdversarialTarget, "answer", broken)
    experiment = tiny_experiment(tmp_path, "fada", run={"on_client_failure": "continue"})
    clients = numbers(run_small(experiment)[0] / "clients.csv").query("round == 2").set_index("client")
    assert clients.loc["rot0", "weight"] == pytest.approx(1 / 3)
    assert "the disk is full" in clients.loc["rot45", "status"]
    with pytest.raises(UserError, match=r"rot45.*the disk is full"):
        run_small(experiment.replace(run={"on_client_failure": "stop", "output": str(tmp_path / "b")}))


def test_what_does_not_fit_is_refused():
    """Visits without a client that answers them, and the reverse; and parts that need the map of the same pass, as
    FADA passes features of several passes through the bottleneck."""
    with pytest.raises(UserError, match=r"method\.unlabelled"):
        check_recipe(dataclasses.replace(METHODS["fada"], unlabelled=None), "x")
    with pytest.raises(UserError, match="never visited"):
        check_recipe(dataclasses.replace(METHODS["fedavg"], unlabelled=AdversarialTarget()), "x")
    with pytest.raises(UserError, match=r"disentangling_adversary .* feature_highlighter reads the map"):
        build_recipe(small_experiment("unused", {"name": "fada", "add": ["feature_highlighter"]}))


@pytest.mark.parametrize(
    ("train", "words"),
    [("head", "adversarial_target trains the backbone"), ("head.*", "FADA has nothing to train here")],
)
def test_a_frozen_extractor_is_refused(train, words, tmp_path):
    with pytest.raises(UserError, match=words):
        run_small(tiny_experiment(tmp_path, "fada", model={"train": train}))
