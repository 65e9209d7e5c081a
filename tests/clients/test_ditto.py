"""Ditto, PerAda, and the properties of personal models."""

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from small_round import colour_images, small_data, small_round
from support import Interrupt, numbers, run_small, small_experiment, tiny_experiment
from torch import nn

from clients.companions.ditto import Ditto
from clients.tools.losses import proximal
from clients.tools.networks import descend
from fedsim.common.errors import UserError
from fedsim.run.plan import resolve
from fedsim.run.traffic import traffic
from fedsim.run.workspace import close_workspaces, workspace
from fedsim.settings import TrainSettings
from fedsim.tensors.arrays import record_to_arrays, state_to_record
from fedsim.tensors.records import config_of

KEEP = {"keep_personal": True}


@pytest.mark.parametrize(("v", "w", "loss", "lam", "lr", "found"), [
    (2.0, 1.0, lambda v: 0.5 * v, 0.1, 0.1, 1.94), (2.0, 1.0, lambda v: 0.5 * v, 0.0, 0.1, 1.95),  # 0: local training
    (2.0, 1.0, lambda v: 0.5 * (v - 3) ** 2, 1.0, 0.1, 2.0),  # the minimizer
    (1.0, 0.0, lambda v: 0 * v, 0.1, 0.5, 0.95), (1.0, 0.25, lambda v: 0 * v, 2.0, 0.5, 0.25),  # v = w at once
])  # fmt: skip
def test_personal_step_numbers(v, w, loss, lam, lr, found):
    """v after one step of Ditto's or PerAda's personal model."""
    part = nn.Parameter(torch.tensor([v], dtype=torch.float64))
    pull = proximal([part], [torch.tensor([w], dtype=torch.float64)], lam)
    descend(torch.optim.SGD([part], lr), loss(part).sum() + pull)
    assert part.item() == pytest.approx(found)


def test_the_pull_is_to_the_received_model():
    """With lr * lam = 1, v = w - lr * gradient after one step, wherever it was."""
    data, net = small_data(colour_images(4)), nn.Sequential(nn.Flatten(), nn.Linear(768, 3))
    round = small_round(data, net=net, train=TrainSettings(momentum=0.0), lr=1e-6)
    round.store.put("ditto", {name: value + 1 for name, value in net.state_dict().items()})
    Ditto(lam=1e6).begin(round)(data.batch(np.arange(4)))
    for own, received in zip(round.scratch["ditto"].parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(own, received, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of Ditto whose network draws (MixStyle), and its experiment."""
    method = {"name": "ditto", "add": ["mix_style"], "mix_style": {"stages": [1]}}
    experiment = tiny_experiment(tmp_path_factory.mktemp("ditto"), method, 3, run=KEEP)
    return run_small(experiment)[0], experiment


def test_personal_models_are_validated_and_kept(run):
    """They have their own columns, and the models in their files have exactly the recorded accuracy."""
    folder, experiment = run
    last = numbers(folder / "clients.csv").query("round == 3").set_index("client")
    assert not last["personal_loss"].equals(last["validation_loss"])
    files = sorted(file.name for file in folder.glob("personal-*"))
    assert files == [f"personal-{name}.safetensors" for name in ("rot0", "rot15", "rot30")]
    close_workspaces()
    space = workspace(experiment.toml())
    for name in ("rot0", "rot30"):
        model = load_file(folder / f"personal-{name}.safetensors")
        space.net.load_state_dict({key: torch.tensor(value) for key, value in model.items()})
        accuracy, loss = space.client(name, "").validate()
        assert accuracy == pytest.approx(last.loc[name, "personal_accuracy"])
        assert loss == pytest.approx(last.loc[name, "personal_loss"], rel=1e-5)


def test_personal_models_survive_a_kill(tmp_path, run):
    folder, experiment = run
    again = experiment.replace(run={"output": str(tmp_path)})
    with pytest.raises(KeyboardInterrupt):
        run_small(again, Interrupt(after_round=2))
    close_workspaces()
    resumed, _ = run_small(again)
    assert numbers(resumed / "clients.csv").equals(numbers(folder / "clients.csv"))
    name = "personal-rot15.safetensors"
    assert (resumed / name).read_bytes() == (folder / name).read_bytes()


def test_personal_batch_norm_is_kept_too(tmp_path):
    """A personal model of FedBN is the last global model with the client's own layers.

    A method without anything personal is refused in one line.
    """
    folder, _ = run_small(tiny_experiment(tmp_path, "fedbn", 1, run=KEEP))
    last, own = load_file(folder / "last.safetensors"), load_file(folder / "personal-rot0.safetensors")
    different = {name for name in last if not (last[name] == own[name]).all()}
    assert different
    assert all("norm" in name for name in different)
    with pytest.raises(UserError, match=r"run\.keep_personal"):
        run_small(tiny_experiment(tmp_path / "b", run=KEEP))


def test_a_refused_reply_leaves_no_trace_in_the_personal_model(tmp_path):
    """It keeps the client's own layers of the last round that the server took."""

    def broken(message, reply):
        config = config_of(message.content)
        if (config["phase"], config.get("round"), config["client"]) == ("train", 2, "rot0"):
            arrays = {key: np.array(array) for key, array in record_to_arrays(reply.content["arrays"]).items()}
            next(iter(arrays.values())).fill(np.nan)
            reply.content["arrays"] = state_to_record(arrays)
        return reply

    one, two = (
        run_small(
            tiny_experiment(
                tmp_path / str(rounds), "fedbn", rounds, train={"evaluate_clients": "1"},
                run={**KEEP, "on_client_failure": "continue"},
            ),
            tamper=broken,
        )[0]
        for rounds in (1, 2)
    )  # fmt: skip
    assert numbers(two / "rounds.csv")["failed"].tolist() == [0, 0, 1]
    for client, same in (("rot0", True), ("rot15", False)):
        a, b = (load_file(folder / f"personal-{client}.safetensors") for folder in (one, two))
        own = [name for name in a if "norm" in name and "running" in name]
        assert all((a[name] == b[name]).all() for name in own) == same


def test_bytes_of_a_round_on_resnet18():
    """Adapters, norms and head: 1,411,719 parameters, 15,488 statistics, and a counter for each of 33 norms."""
    data = {"classes": [], "dataset": "pacs", "domains": [], "image_size": 64}
    model, target = {"backbone": "resnet18"}, {"target": "sketch"}
    (train, *_) = traffic(resolve(small_experiment("unused", "perada", model=model, data=data, run=target)))
    assert train.down == train.up == 4 * (1_411_719 + 15_488) + 8 * 33
