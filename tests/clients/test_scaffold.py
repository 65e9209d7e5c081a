"""SCAFFOLD, Option II: client and server."""

import dataclasses

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors.numpy import load_file
from small_round import colour_images, small_data, small_round
from support import Interrupt, numbers, run_small, small_experiment
from torch import nn

from clients.store import newest_entry
from clients.terms.drift_correction import OWN, DriftCorrection, gradient_count
from fedsim.common.errors import UserError
from fedsim.common.seeding import numpy_rng
from fedsim.data import load_client
from fedsim.run.checkpoint import load_checkpoint
from fedsim.run.plan import run_folder
from fedsim.settings import TrainSettings
from strategies.banks.control_variates import ControlVariates
from strategies.parts import SERVER, ServerRound


def scalar_round(c=0.0, own=0.0, variant="option_ii", momentum=0.0, steps=5, lr=0.1, strength=1.0, **changes):
    """(y, c_k+, delta c_k) after a round with w = 1 and the constant gradient 2."""
    net = nn.Module()
    net.w = nn.Parameter(torch.tensor([1.0]))
    part = DriftCorrection(variant, strength)
    train = TrainSettings(**{"momentum": momentum, "epochs": 1, **changes.pop("train", {})})
    record = {"control": {"w": np.array([c], np.float32)} if c else {}}
    round = small_round(small_data(colour_images(3)), record, net, train=train, steps=steps, **changes)
    if own:
        round.store.put(OWN, {"w": torch.tensor([own])})
    round.optimizer = torch.optim.SGD(net.parameters(), lr, momentum=momentum)
    assert part.begin(round) is None
    for _ in range(steps):
        round.apply_gradients(2 * net.w.sum())
    part.end(round)
    return net.w.item(), round.store.get(OWN)["w"].item(), round.outbox["control"]["w"].item()


def test_numbers_by_hand():
    """Case 1: y = 0, c_k+ = 2; case 2 (c = .5, c_k = 2): y = .75, c_k+ = 2."""
    assert scalar_round() == pytest.approx((0.0, 2.0, 2.0), abs=1e-6)
    assert scalar_round(c=0.5, own=2.0) == pytest.approx((0.75, 2.0, 0.0), abs=1e-6)


def test_released_normalisations():
    """Case 1 with the two wrong normalizations: 10 (one epoch), 5 (two epochs of iterations) and 0.2."""
    assert scalar_round(variant="epochs_only")[1] == pytest.approx(10.0, abs=1e-5)
    by_iterations = {"train": {"iterations": 5}, "images": 6}  # of the 3 images of the client: two epochs
    assert scalar_round(variant="epochs_only", **by_iterations)[1] == pytest.approx(5.0, abs=1e-5)
    assert scalar_round(variant="without_rate")[1] == pytest.approx(0.2, abs=1e-6)


def test_half_of_the_correction():
    """c = .5, c_k = 2, strength .5: the gradient is 2 - .75, y = 1 - .625, c_k+ = 2 - .5 + .625 / .5."""
    assert scalar_round(c=0.5, own=2.0, strength=0.5) == pytest.approx((0.375, 2.75, 0.75), abs=1e-6)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_momentum_divides_by_the_gradients_that_acted(steps):
    """FedNova: a(.9, 2) = 2.9, a(.9, 3) = 5.61; a constant gradient is recovered whatever the momentum."""
    assert gradient_count(2, 0.9) == pytest.approx(2.9)
    assert gradient_count(3, 0.9) == pytest.approx(5.61)
    assert gradient_count(7, 0.0) == 7.0
    assert scalar_round(momentum=0.9, steps=steps)[1] == pytest.approx(2.0, abs=1e-5)
    assert scalar_round(c=0.5, own=1.5, momentum=0.9, steps=steps)[1] == pytest.approx(2.0, abs=1e-5)


def test_a_round_that_does_not_move_keeps_the_variate():
    """A learning rate of 0 (the last round of an official cosine) divides nothing by 0."""
    assert scalar_round(c=0.5, own=2.0, lr=0.0) == (1.0, 2.0, 0.0)


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


def test_one_client_is_fedavg(tmp_path):
    """With one client c = c_k, and therefore FedAvg's rounds with plain SGD."""
    one_client = {"domains": ["rot0", "rot45"]}
    train = {"momentum": 0.0}
    ours, _ = run_small(small_experiment(tmp_path / "a", "scaffold", data=one_client, train=train))
    plain, _ = run_small(small_experiment(tmp_path / "b", data=one_client, train=train))
    a, b = (numbers(folder / "rounds.csv") for folder in (ours, plain))
    np.testing.assert_allclose(a["train_loss"].iloc[1:], b["train_loss"].iloc[1:], rtol=1e-5)
    np.testing.assert_allclose(a["target_loss"], b["target_loss"], rtol=1e-4)


def test_variates_of_identical_clients_are_equal(tmp_path, monkeypatch):
    """After every round of three clients c = c_k for all k, and the model is FedAvg's with plain SGD."""

    def same_data(settings, name, *words):
        return dataclasses.replace(load_client(settings, "rot0", *words), client=name)

    def without_the_client(seed, purpose, client, *rest):
        return numpy_rng(seed, purpose, *rest)

    monkeypatch.setattr("fedsim.run.workspace.load_client", same_data)
    monkeypatch.setattr("clients.local_round.numpy_rng", without_the_client)
    train = {"momentum": 0.0}
    for rounds in (1, 2):
        experiment = small_experiment(tmp_path / str(rounds), "scaffold", train=train)
        with pytest.raises(KeyboardInterrupt):
            run_small(experiment, Interrupt(rounds))
        folder = run_folder(experiment)
        state = load_checkpoint(folder / "checkpoint").state
        server = state.banks["control"][SERVER]
        assert max(np.abs(array).max() for array in server.values()) > 0.01
        for client in ("rot0", "rot15", "rot30"):
            own = newest_entry(folder / "state" / client, OWN)
            assert own.keys() == server.keys()
            for name, array in server.items():
                np.testing.assert_allclose(array, own[name].numpy(), atol=1e-5, err_msg=f"{client} {name}")
    whole, plain = (
        load_file(run_small(small_experiment(tmp_path / method, method, train=train))[0] / "last.safetensors")
        for method in ("scaffold", "fedavg")
    )
    for name, array in plain.items():
        np.testing.assert_allclose(whole[name], array, atol=1e-4, err_msg=name)


def test_correction_acts_and_survives_partial_participation(tmp_path):
    """With two of three clients per round the model is finite and differs from FedAvg's from round 2 on.

    Only parameters have variates.
    """
    train = {"clients_per_round": 2, "momentum": 0.0}
    ours, grid = run_small(small_experiment(tmp_path / "a", "scaffold", train=train))
    plain, _ = run_small(small_experiment(tmp_path / "b", train=train))
    a, b = (numbers(folder / "rounds.csv") for folder in (ours, plain))
    assert np.isfinite(a["train_loss"].iloc[1:]).all()
    assert a.loc[1, "target_loss"] == b.loc[1, "target_loss"]
    assert a.loc[2, "target_loss"] != b.loc[2, "target_loss"]
    sent = [reply.content.array_records for message, reply in grid.seen if message.metadata.message_type == "train"]
    assert len(sent) == 6
    assert all(set(records) == {"arrays", "control"} for records in sent)
    assert all(not name.endswith(("running_mean", "num_batches_tracked")) for name in sent[0]["control"])


def test_own_layers_are_not_corrected(tmp_path):
    """With FedBN's share rule batch norm has no variate."""
    _, grid = run_small(small_experiment(tmp_path, "scaffold+fedbn", train={"rounds": 1}))
    controls = [reply.content.array_records["control"] for m, reply in grid.seen if m.metadata.message_type == "train"]
    assert all(not any("norm" in name for name in control) for control in controls)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"optimizer": "adam", "momentum": 0.0}, "optimizer = 'sgd'"),
        ({"persist_optimizer": True}, "persist_optimizer"),
    ],
)
def test_what_breaks_the_identity_is_refused(tmp_path, train, words):
    with pytest.raises(UserError, match=words):
        run_small(small_experiment(tmp_path, "scaffold", train=train))


def test_a_refused_reply_leaves_the_variate_as_it_was(tmp_path):
    """With all clients in every round c is the mean of the c_k; a reply that is refused must change neither."""

    def spoil(message: Message, reply: Message) -> Message:
        config = message.content.config_records["config"]
        if (config["client"], config["round"], config["phase"]) == ("rot15", 2, "train"):
            reply.content.metric_records["metrics"]["num-examples"] += 1
        return reply

    experiment = small_experiment(
        tmp_path, "scaffold", run={"on_client_failure": "continue"}, data={"fraction": 0.05}, train={"momentum": 0.0}
    )
    with pytest.raises(KeyboardInterrupt):
        run_small(experiment, Interrupt(3), tamper=spoil)
    folder = run_folder(experiment)
    server = load_checkpoint(folder / "checkpoint").state.banks["control"][SERVER]
    own = [newest_entry(folder / "state" / client, OWN) for client in ("rot0", "rot15", "rot30")]
    for name, array in server.items():
        mean = sum(each[name].numpy().astype(np.float64) for each in own) / 3
        np.testing.assert_allclose(array, mean, atol=1e-5, err_msg=name)
