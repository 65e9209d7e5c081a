"""SCAFFOLD, Option II: client and server."""

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from small_round import colour_images, small_data, small_round
from support import Interrupt, run_small, tiny_experiment
from torch import nn

from clients.store import newest_entry
from clients.terms.drift_correction import OWN, DriftCorrection, gradient_count
from fedsim.common.seeding import numpy_rng
from fedsim.data import load_client
from fedsim.run.checkpoint import load_checkpoint
from fedsim.run.plan import run_folder
from fedsim.settings import TrainSettings
from strategies.banks.control_variates import ControlVariates
from strategies.parts import SERVER, ServerRound

CLIENTS = ("rot0", "rot15", "rot30")


def scalar_round(
    c=0.0, own=0.0, variant="option_ii", momentum=0.0, steps=5, lr=0.1, strength=1.0, train=None, **changes
):
    """(y, c_k+, delta c_k) after a round with w = 1 and the constant gradient 2."""
    net = nn.Module()
    net.w = nn.Parameter(torch.tensor([1.0]))
    settings = TrainSettings(**{"momentum": momentum, "epochs": 1, **(train or {})})
    record = {"control": {"w": np.array([c], np.float32)} if c else {}}
    round = small_round(small_data(colour_images(3)), record, net, train=settings, steps=steps, **changes)
    if own:
        round.store.put(OWN, {"w": torch.tensor([own])})
    round.optimizer = torch.optim.SGD(net.parameters(), lr, momentum=momentum)
    part = DriftCorrection(variant, strength)
    assert part.begin(round) is None
    for _ in range(steps):
        round.apply_gradients(2 * net.w.sum())
    part.end(round)
    return net.w.item(), round.store.get(OWN)["w"].item(), round.outbox["control"]["w"].item()


@pytest.mark.parametrize(("settings", "found"), [
    ({}, (0.0, 2.0, 2.0)), ({"c": 0.5, "own": 2.0}, (0.75, 2.0, 0.0)),
    ({"c": 0.5, "own": 2.0, "strength": 0.5}, (0.375, 2.75, 0.75)),  # the gradient is 2 - .75; 2 - .5 + .625 / .5
    ({"c": 0.5, "own": 2.0, "lr": 0.0}, (1.0, 2.0, 0.0)),  # the last round of a cosine divides nothing by 0
    ({"variant": "epochs_only"}, (0.0, 10.0, 10.0)), ({"variant": "without_rate"}, (0.0, 0.2, 0.2)),
    # 6 images of the 3 of the client: two epochs of iterations
    ({"variant": "epochs_only", "train": {"iterations": 5}, "images": 6}, (0.0, 5.0, 5.0)),
])  # fmt: skip
def test_numbers_by_hand(settings, found):
    assert scalar_round(**settings) == pytest.approx(found, abs=1e-5)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_momentum_divides_by_the_gradients_that_acted(steps):
    """A constant gradient is recovered whatever the momentum; FedNova's counts are in test_optimizers.py."""
    assert scalar_round(momentum=0.9, steps=steps)[1] == pytest.approx(2.0, abs=1e-5)
    assert scalar_round(c=0.5, own=1.5, momentum=0.9, steps=steps)[1] == pytest.approx(2.0, abs=1e-5)
    assert gradient_count(7, 0.0) == 7.0


def test_server_counts_all_clients():
    """c + (|S|/N) times the mean change, when two of four clients deliver; the first c is sent as an empty record."""
    bank = ControlVariates()
    previous = {"w": np.zeros(2, np.float32), "buffer": np.zeros(1, np.float32)}
    server = ServerRound(2, 4, list("abcd"), previous, parameters=frozenset({"w"}))
    assert bank.hand_out({}, "a", server) == {}
    old = {SERVER: {"w": np.array([1.0, 0.0], np.float32)}}
    changes = {"a": {"w": np.array([2.0, 4.0], np.float32)}, "c": {"w": np.array([4.0, -8.0], np.float32)}}
    new = bank.merge(old, changes, server)
    np.testing.assert_allclose(new[SERVER]["w"], [2.5, -1.0])
    assert new[SERVER]["w"].dtype == np.float32
    assert bank.hand_out(new, "b", server) is new[SERVER]
    assert bank.accept("a", changes["a"], server) == ""
    assert "'buffer'" in bank.accept("a", {**changes["a"], "buffer": previous["buffer"]}, server)
    assert "expected float32[2]" in bank.accept("a", {"w": np.zeros(3, np.float32)}, server)


def variates(experiment, rounds, **words):
    """(the server's, {client: its own}) after so many rounds, in which an interrupt stops the run."""
    with pytest.raises(KeyboardInterrupt):
        run_small(experiment, Interrupt(rounds), **words)
    folder = run_folder(experiment)
    server = load_checkpoint(folder / "checkpoint").state.banks["control"][SERVER]
    assert max(np.abs(array).max() for array in server.values()) > 0.01
    return server, {client: newest_entry(folder / "state" / client, OWN) for client in CLIENTS}


def test_variates_of_identical_clients_are_equal(tmp_path, monkeypatch):
    """After two rounds of three clients c = c_k for all k, and the model is FedAvg's with plain SGD."""

    def same_data(settings, name, *words):
        return dataclasses.replace(load_client(settings, "rot0", *words), client=name)

    def without_the_client(seed, purpose, client, *rest):
        return numpy_rng(seed, purpose, *rest)

    monkeypatch.setattr("fedsim.run.workspace.load_client", same_data)
    monkeypatch.setattr("clients.local_round.numpy_rng", without_the_client)
    train = {"momentum": 0.0, "iterations": 3}
    server, own = variates(tiny_experiment(tmp_path / "variates", "scaffold", 3, train=train), 2)
    for client in CLIENTS:
        assert own[client].keys() == server.keys()
        for name, array in server.items():
            np.testing.assert_allclose(array, own[client][name].numpy(), atol=1e-5, err_msg=f"{client} {name}")
    whole, plain = (
        load_file(run_small(tiny_experiment(tmp_path / method, method, 3, train=train))[0] / "last.safetensors")
        for method in ("scaffold", "fedavg")
    )
    for name, array in plain.items():
        np.testing.assert_allclose(whole[name], array, atol=1e-4, err_msg=name)


def test_a_refused_reply_leaves_the_variate_as_it_was(tmp_path):
    """With all clients in every round c is the mean of the c_k; a reply that is refused must change neither."""

    def spoil(message, reply):
        config = message.content.config_records["config"]
        if (config["client"], config["round"], config["phase"]) == ("rot15", 2, "train"):
            reply.content.metric_records["metrics"]["num-examples"] += 1
        return reply

    changes = {"run": {"on_client_failure": "continue"}, "train": {"momentum": 0.0, "iterations": 3}}
    server, own = variates(tiny_experiment(tmp_path, "scaffold", 4, **changes), 3, tamper=spoil)
    for name, array in server.items():
        mean = sum(each[name].numpy().astype(np.float64) for each in own.values()) / 3
        np.testing.assert_allclose(array, mean, atol=1e-5, err_msg=name)
