"""Whole runs of PerAda: what is sent, what stays, and when it is FedAvg."""

import pytest
import torch
from safetensors.numpy import load_file
from support import numbers, run_small, small_experiment
from test_ditto import personal_step

from fedsim.run.plan import resolve
from fedsim.run.traffic import traffic
from fedsim.run.workspace import Workspace


def test_personal_step_numbers():
    """v = 1, w = 0, no gradient of the data, eta = .5, lambda = .1 -> .95; lambda eta = 1 gives v = w at once."""
    assert personal_step(1.0, 0.0, lambda v: 0 * v, 0.1, 0.5) == pytest.approx(0.95)
    assert personal_step(1.0, 0.25, lambda v: 0 * v, 2.0, 0.5) == pytest.approx(0.25)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with its messages and plan, and a run without personal models."""
    root = tmp_path_factory.mktemp("perada")
    ours = small_experiment(root / "a", "perada", train={"rounds": 2}, run={"keep_personal": True})
    plain = small_experiment(root / "b", {"name": "perada", "companions": "none"}, train={"rounds": 2})
    folder, grid = run_small(ours)
    return folder, grid, ours, run_small(plain)[0]


def test_only_the_exchanged_set_travels(run):
    """Keys and bytes of every message in both directions; no frozen tensor and no personal model."""
    folder, grid, experiment, _ = run
    space = Workspace(resolve(experiment))
    state = space.net.state_dict()
    exchanged = {name for name in state if name not in space.net.frozen}
    assert {"adapters.0.conv.weight", "head.bias", "backbone.norm1.running_var"} <= exchanged
    assert not {"backbone.conv1.weight", "backbone.fc.weight"} & exchanged
    size = sum(state[name].nbytes for name in exchanged)
    count = 0
    for message, reply in grid.seen:
        if message.metadata.message_type == "train":
            count += 1
            for content in (message.content, reply.content):
                assert set(content.array_records) == {"arrays"}
                assert set(content.array_records["arrays"]) == exchanged
    assert count == 6
    clients = numbers(folder / "clients.csv")
    trained = clients[clients["round"] > 0]
    assert (trained["bytes_up"] == size).all()
    assert (trained["bytes_down"] == 2 * size).all()  # once more to be validated


def test_frozen_tensors_are_nowhere(run):
    """They are neither in the saved model nor in the personal models, which hold the whole exchanged set."""
    folder, _, experiment, _ = run
    frozen = Workspace(resolve(experiment)).net.frozen
    last = load_file(folder / "last.safetensors")
    for file in folder.glob("personal-*.safetensors"):
        personal = load_file(file)
        assert personal.keys() == last.keys()
        assert any((personal[name] != last[name]).any() for name in last)
    assert not frozen & last.keys()


def test_personal_models_leave_the_global_one_alone(run):
    """`companions = "none"`, which trains no personal models, gives the same numbers."""
    folder, _, _, plain = run
    a, b = (load_file(path / "last.safetensors") for path in (folder, plain))
    assert all((a[name] == b[name]).all() for name in b)


def personal_of(tmp_path, name, changes):
    """Personal model of a client after one round."""
    method = {"name": "perada", **changes}
    experiment = small_experiment(tmp_path / name, method, train={"rounds": 1}, run={"keep_personal": True})
    folder, _ = run_small(experiment)
    return load_file(folder / "personal-rot0.safetensors"), load_file(folder / "last.safetensors")


def test_personal_models_follow_the_received_model(tmp_path):
    """Other training of the local adapter (by a term of its loss) does not change v of that round."""
    one, last = personal_of(tmp_path, "a", {})
    other, moved = personal_of(tmp_path, "b", {"add": ["label_smoothing"], "label_smoothing": {"eps": 0.5}})
    assert all((one[name] == other[name]).all() for name in one)
    assert any((last[name] != moved[name]).any() for name in last)


def test_a_client_that_is_not_drawn_keeps_its_model(tmp_path):
    """Its stored model is that of the last round in which it trained."""
    experiment = small_experiment(tmp_path, "perada", train={"rounds": 3, "clients_per_round": 1})
    stored = {}

    class Look:
        def on_start(self, experiment, folder):
            self.folder = folder

        def on_round(self, row, clients):
            files = {path: path.read_bytes() for path in sorted((self.folder / "state").rglob("ditto-*.safetensors"))}
            stored[row["round"]] = {}
            for path, content in files.items():
                stored[row["round"]][path.parent.name] = content
            if row["round"] > 1:
                drawn = {row["client"] for row in clients if "train_loss" in row}
                before = stored[row["round"] - 1]
                assert all(before[name] == stored[row["round"]][name] for name in before.keys() - drawn)

        def on_end(self, summary):
            assert len(stored) == 4

    run_small(experiment, Look())
    assert stored[3]


def test_neutral_settings_are_fedavg(tmp_path):
    """8.1: without adapters, frozen tensors, personal models and distillation it is FedAvg with uniform weights."""
    neutral = {"name": "perada", "inserts": "none", "companions": "none"}
    ours, _ = run_small(small_experiment(tmp_path / "a", neutral))
    plain, _ = run_small(small_experiment(tmp_path / "b", {"name": "fedavg", "weights": "uniform"}))
    a, b = (load_file(folder / "last.safetensors") for folder in (ours, plain))
    assert all(torch.equal(torch.tensor(a[name]), torch.tensor(b[name])) for name in b)
    assert numbers(ours / "rounds.csv").equals(numbers(plain / "rounds.csv"))


def test_bytes_of_a_round_on_resnet18():
    """Adapters, norms and head: 1,411,719 parameters, 15,488 statistics, and a counter for each of 33 norms."""
    changes = {"classes": [], "dataset": "pacs", "domains": [], "image_size": 64}
    model = {"backbone": "resnet18"}
    experiment = small_experiment("unused", "perada", model=model, data=changes, run={"target": "sketch"})
    (train, *_) = traffic(resolve(experiment))
    assert train.down == train.up == 4 * (1_411_719 + 15_488) + 8 * 33
