"""Ditto, and the properties of personal models."""

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from small_round import colour_images, small_data, small_round
from support import Interrupt, numbers, run_small, small_experiment
from torch import nn

from clients.companions.ditto import Ditto
from clients.tools.losses import proximal
from clients.tools.networks import descend
from fedsim.common.errors import UserError
from fedsim.run.workspace import close_workspaces, workspace
from fedsim.settings import TrainSettings
from fedsim.tensors.arrays import record_to_arrays, state_to_record
from fedsim.tensors.records import config_of


def personal_step(v, w, gradient, lam, lr):
    """v after one step on a loss with the given gradient."""
    part = nn.Parameter(torch.tensor([v], dtype=torch.float64))
    optimizer = torch.optim.SGD([part], lr)
    descend(optimizer, gradient(part).sum() + proximal([part], [torch.tensor([w], dtype=torch.float64)], lam))
    return part.item()


def test_personal_step_numbers():
    """One step gives 1.94; the minimizer of (v-3)^2/2 with w = 1, lambda = 1 is 2; lambda = 0 is local training."""
    assert personal_step(2.0, 1.0, lambda v: 0.5 * v, 0.1, 0.1) == pytest.approx(1.94)
    v = 0.0
    for _ in range(200):
        v = personal_step(v, 1.0, lambda v: 0.5 * (v - 3) ** 2, 1.0, 0.1)
    assert v == pytest.approx(2.0)
    assert personal_step(2.0, 1.0, lambda v: 0.5 * v, 0.0, 0.1) == pytest.approx(1.95)


def test_the_pull_is_to_the_received_model():
    """With lr * lam = 1, v = w - lr * gradient after one step, wherever it was."""
    data, net = small_data(colour_images(4)), nn.Sequential(nn.Flatten(), nn.Linear(768, 3))
    round = small_round(data, net=net, train=TrainSettings(momentum=0.0))
    round.lr = 1e-6
    round.store.put("ditto", {name: value + 1 for name, value in net.state_dict().items()})
    part = Ditto(lam=1e6)
    part.begin(round)(data.batch(np.arange(4)))
    for own, received in zip(round.scratch["ditto"].parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(own, received, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of a run of Ditto and of one of FedAvg, both with random draws in the network (MixStyle)."""
    root = tmp_path_factory.mktemp("ditto")
    method = {"name": "ditto", "add": ["mix_style"], "mix_style": {"stages": [1]}}
    ours = small_experiment(root / "a", method, run={"keep_personal": True})
    plain = small_experiment(root / "b", {**method, "name": "fedavg"})
    return run_small(ours)[0], run_small(plain)[0], ours


def test_shared_model_is_fedavgs(runs):
    """They are equal bit for bit after three rounds, even with random layers; nothing more is sent."""
    ours, plain, _ = runs
    a, b = (load_file(folder / "last.safetensors") for folder in (ours, plain))
    assert all((a[name] == b[name]).all() for name in b)
    columns = ["train_loss", "mean_validation_accuracy", "target_accuracy", "bytes_up", "bytes_down"]
    assert numbers(ours / "rounds.csv")[columns].equals(numbers(plain / "rounds.csv")[columns])


def test_personal_models_are_validated_and_kept(runs):
    """They have their own columns, and the models in their files have exactly the recorded accuracy."""
    ours, plain, experiment = runs
    clients = numbers(ours / "clients.csv")
    last = clients[clients["round"] == 3].set_index("client")
    assert not last["personal_loss"].equals(last["validation_loss"])
    assert "personal_accuracy" not in numbers(plain / "clients.csv")
    assert sorted(file.name for file in ours.glob("personal-*")) == [
        f"personal-{name}.safetensors" for name in ("rot0", "rot15", "rot30")
    ]
    close_workspaces()
    space = workspace(experiment.toml())
    for name in ("rot0", "rot30"):
        client = space.client(name, "")
        model = load_file(ours / f"personal-{name}.safetensors")
        space.net.load_state_dict({key: torch.tensor(value) for key, value in model.items()})
        accuracy, loss = client.validate()
        assert accuracy == pytest.approx(last.loc[name, "personal_accuracy"])
        assert loss == pytest.approx(last.loc[name, "personal_loss"], rel=1e-5)


def test_personal_models_survive_a_kill(tmp_path, runs):
    """A run that was interrupted and resumed keeps the same personal models."""
    ours, _, experiment = runs
    again = experiment.replace(run={"output": str(tmp_path)})
    with pytest.raises(KeyboardInterrupt):
        run_small(again, Interrupt(after_round=2))
    close_workspaces()
    resumed, _ = run_small(again)
    assert numbers(resumed / "clients.csv").equals(numbers(ours / "clients.csv"))
    a, b = (load_file(folder / "personal-rot15.safetensors") for folder in (resumed, ours))
    assert all((a[name] == b[name]).all() for name in b)


def test_personal_batch_norm_is_kept_too(tmp_path):
    """A personal model of FedBN is the last global model with the client's own layers.

    A method without anything personal is refused in one line.
    """
    folder, _ = run_small(small_experiment(tmp_path, "fedbn", run={"keep_personal": True}, train={"rounds": 1}))
    last, own = load_file(folder / "last.safetensors"), load_file(folder / "personal-rot0.safetensors")
    different = {name for name in last if not (last[name] == own[name]).all()}
    assert different
    assert all("norm" in name for name in different)
    with pytest.raises(UserError, match=r"run\.keep_personal"):
        run_small(small_experiment(tmp_path / "b", run={"keep_personal": True}))


def test_a_refused_reply_leaves_no_trace_in_the_personal_model(tmp_path):
    """It keeps the client's own layers of the last round that the server took."""

    def broken(message, reply):
        config = config_of(message.content)
        if (config["phase"], config.get("round"), config["client"]) == ("train", 2, "rot0"):
            arrays = {key: np.array(array) for key, array in record_to_arrays(reply.content["arrays"]).items()}
            next(iter(arrays.values())).fill(np.nan)
            reply.content["arrays"] = state_to_record(arrays)
        return reply

    changes = {"run": {"keep_personal": True, "on_client_failure": "continue"}}
    one, _ = run_small(
        small_experiment(tmp_path / "a", "fedbn", train={"rounds": 1, "evaluate_clients": "1"}, **changes)
    )
    experiment = small_experiment(tmp_path / "b", "fedbn", train={"rounds": 2, "evaluate_clients": "1"}, **changes)
    two, _ = run_small(experiment, tamper=broken)
    assert numbers(two / "rounds.csv")["failed"].tolist() == [0, 0, 1]
    for client, same in (("rot0", True), ("rot15", False)):
        a, b = (load_file(folder / f"personal-{client}.safetensors") for folder in (one, two))
        own = [name for name in a if "norm" in name and "running" in name]
        assert all((a[name] == b[name]).all() for name in own) == same
