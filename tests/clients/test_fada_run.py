"""FADA in whole runs: its exchanges, what is marked in results, and what of the target is read."""

import dataclasses

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import Interrupt, numbers, run_small, small_experiment

import fedsim.data.loading as loading
from clients.unlabelled.adversarial_target import AdversarialTarget
from fedsim.common.errors import UserError
from fedsim.data.digits import Digits
from fedsim.methods.assembly import build_recipe
from fedsim.methods.compatibility import check_recipe
from fedsim.methods.table import METHODS
from fedsim.run.workspace import close_workspaces
from fedsim.tensors.arrays import record_to_arrays


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder, messages) of a complete run."""
    experiment = small_experiment(tmp_path_factory.mktemp("fada"), "fada")
    return *run_small(experiment), experiment


def model_of(folder):
    """The last model."""
    return load_file(folder / "last.safetensors")


def weight_of(record):
    """Bytes of a record's tensors."""
    return sum(array.nbytes for array in record_to_arrays(record).values())


def test_three_exchanges_a_round(run):
    """3.4: kinds of messages, what they hold, and their bytes in clients.csv; the target is asked for no label."""
    folder, grid, _ = run
    visits = [(message, reply) for message, reply in grid.seen if message.metadata.message_type == "query.visit"]
    assert [message.content.config_records["config"]["phase"] for message, _ in visits] == ["attention", "adapt"] * 3
    assert set(visits[0][0].content.array_records) == {"arrays", *(f"candidate:000{place}" for place in range(3))}
    assert set(visits[0][1].content.array_records) == {"tightness"}
    assert set(visits[1][0].content.array_records) == {"arrays"}  # round 1: identifiers are not trained yet
    assert set(visits[3][0].content.array_records) == {
        "arrays",
        *(f"identifier:{n}" for n in ("rot0", "rot15", "rot30")),
    }
    assert set(visits[3][1].content.array_records) == {"generator", "target_features"}
    trains = [message for message, _ in grid.seen if message.metadata.message_type == "train"]
    assert ["target_features" in message.content.array_records for message in trains] == [False] * 3 + [True] * 6
    clients = numbers(folder / "clients.csv")
    weights = clients[clients["round"] > 0].groupby("round")["weight"].sum()
    assert weights.tolist() == pytest.approx([1, 1, 1])
    size = sum(value.nbytes for value in model_of(folder).values())
    target = clients[(clients["client"] == "rot45") & (clients["round"] == 3)].iloc[0]
    sent, answered = (content.array_records for content in (visits[3][0].content, visits[3][1].content))
    assert target["bytes_down"] == 5 * size + 3 * weight_of(sent["identifier:rot0"])
    assert target["bytes_up_target_features"] == weight_of(answered["target_features"])


def test_results_are_marked(run):
    """The summary says that target images were used, and on how many it was tested."""
    folder, _, _ = run
    summary = numbers(folder / "summary.csv").iloc[0]
    assert summary["uses_target_unlabelled"]
    indices = loading.load_target(small_experiment(folder).data, "rot45")[2]
    assert 0.3 * len(indices) < summary["target_images"] < 0.7 * len(indices)


def test_tested_images_are_never_adapted_to(run):
    """The two parts of the target have no image in common, whatever share is used for adaptation."""
    for share in (0.2, 0.5, 0.9):
        data = run[2].data.model_copy(update={"adapt_share": share})
        apart = loading.load_unlabelled(data, "rot45")
        tested = loading.load_target(data, "rot45")[2]
        assert not set(apart.train) & set(tested)
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
    a, b = model_of(folder), model_of(other)
    assert all((a[name] == b[name]).all() for name in a)
    clients = numbers(folder / "clients.csv")
    assert clients.equals(numbers(other / "clients.csv"))
    assert not numbers(folder / "rounds.csv")["target_accuracy"].equals(
        numbers(other / "rounds.csv")["target_accuracy"]
    )


def test_resumed_run_is_the_same(run, tmp_path):
    """8.4: banks, alpha, the sources' networks and their moments are restored."""
    folder, _, experiment = run
    again = experiment.replace(run={"output": str(tmp_path)})
    with pytest.raises(KeyboardInterrupt):
        run_small(again, Interrupt(after_round=2))
    close_workspaces()
    resumed, _ = run_small(again)
    assert numbers(resumed / "clients.csv").equals(numbers(folder / "clients.csv"))


def test_a_target_that_fails(tmp_path, monkeypatch):
    """The run goes on with uniform weights and without target features; by default it stops with the reason."""

    def broken(self, round):
        raise UserError("the disk is full")

    monkeypatch.setattr(AdversarialTarget, "answer", broken)
    experiment = small_experiment(tmp_path, "fada", train={"rounds": 2}, run={"on_client_failure": "continue"})
    folder, _ = run_small(experiment)
    clients = numbers(folder / "clients.csv").query("round == 2").set_index("client")
    assert clients.loc["rot0", "weight"] == pytest.approx(1 / 3)
    assert "the disk is full" in clients.loc["rot45", "status"]
    stopping = experiment.replace(run={"on_client_failure": "stop", "output": str(tmp_path / "b")})
    with pytest.raises(UserError, match=r"rot45.*the disk is full"):
        run_small(stopping)


def test_parts_that_miss_each_other():
    """Visits without a client that answers them, and such a client without visits, are refused in one line."""
    row = METHODS["fada"]
    with pytest.raises(UserError, match=r"method\.unlabelled"):
        check_recipe(dataclasses.replace(row, unlabelled=None), "x")
    with pytest.raises(UserError, match="never visited"):
        check_recipe(dataclasses.replace(METHODS["fedavg"], unlabelled=AdversarialTarget()), "x")


def test_what_needs_the_map_of_the_same_pass_is_refused():
    """FADA passes features of several passes, and stored ones, through the bottleneck that the highlighter is in."""
    with pytest.raises(UserError, match=r"disentangling_adversary .* feature_highlighter reads the map") as caught:
        build_recipe(small_experiment("unused", {"name": "fada", "add": ["feature_highlighter"]}))
    assert "\n" not in str(caught.value)


def test_a_frozen_extractor_is_refused(tmp_path):
    with pytest.raises(UserError, match="adversarial_target trains the backbone"):
        run_small(small_experiment(tmp_path, "fada", model={"train": "head"}))
    frozen = small_experiment(tmp_path, "fada", model={"train": "head.*"})
    with pytest.raises(UserError, match="FADA has nothing to train here"):
        run_small(frozen)
