"""A server part that trains and a bank that the server makes: resumed exactly, and seen by the clients."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from support import Interrupt, numbers, run_small, small_experiment

from clients.parts import Term
from clients.reports.gradient_count import GradientCount
from fedsim.methods import table as methods
from fedsim.methods.recipe import Recipe
from fedsim.run.workspace import close_workspaces
from fedsim.tensors.arrays import load_arrays, record_to_arrays
from strategies.banks.global_direction import GlobalDirection
from strategies.parts import Broadcast, Refine


@dataclass(frozen=True)
class Distil(Refine):
    """Trains the fused model for one step on noise, and stores a tensor and a count."""

    def refine(self, fused, server):
        """One step of SGD on the server."""
        net = server.build_net()
        load_arrays(net, fused, list(fused))
        images = torch.rand(4, 1, 28, 28, generator=server.generator("noise")) + float(server.rng("shift").random())
        net.train()(images).logsumexp(1).mean().backward()
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                assert name in server.parameters
                parameter -= 0.1 * parameter.grad
        state = {name: tensor.numpy().copy() for name, tensor in net.state_dict().items()}
        trace = server.arrays.setdefault("trace", np.zeros_like(state["head.bias"]))
        trace += state["head.bias"]
        server.state["rounds"] = server.state.get("rounds", 0) + 1
        state["head.bias"] = state["head.bias"] + 0.01 * trace
        return {name: state[name] for name in fused}


@dataclass(frozen=True)
class LastMove(Broadcast):
    """The last global move of the head's bias."""

    name: ClassVar[str] = "move"

    def make(self, server):
        """Zero before round 1."""
        return {"bias": server.current["head.bias"] - server.previous["head.bias"]}


noted = []


@dataclass(frozen=True)
class Reading(Term):
    """Notes the broadcast that came and the model's bias."""

    def begin(self, round):
        """Adds nothing to the loss."""
        noted.append((round.client, round.round, round.record("move", "reading")["bias"].copy(),
                      round.net.state_dict()["head.bias"].numpy().copy()))  # fmt: skip
        return


@pytest.fixture
def trained_by_the_server(monkeypatch):
    """A row whose server trains and broadcasts."""
    row = Recipe(refine=(Distil(),), banks=(LastMove(),), terms=(Reading(),))
    monkeypatch.setitem(methods.METHODS, "distilled", row)
    noted.clear()
    close_workspaces()
    return "distilled"


def test_a_server_that_trains_is_resumed_exactly_and_broadcasts_its_moves(trained_by_the_server, tmp_path):
    """After a kill in round 2 the tables are the same; each client receives the last change of the global model."""
    whole, _ = run_small(small_experiment(tmp_path / "whole", trained_by_the_server))
    biases = {round: bias for _, round, _, bias in noted}
    for _, round, move, _ in noted:
        np.testing.assert_array_equal(move, biases[round] - biases[round - 1] if round > 1 else 0 * move)
    assert (biases[3] != biases[2]).all()
    assert set(numbers(whole / "clients.csv").query("round > 0")["bytes_down_move"]) == {40}
    with pytest.raises(KeyboardInterrupt):
        run_small(small_experiment(tmp_path / "cut", trained_by_the_server), Interrupt(2))
    close_workspaces()
    cut, _ = run_small(small_experiment(tmp_path / "cut", trained_by_the_server))
    assert numbers(cut / "rounds.csv").equals(numbers(whole / "rounds.csv"))
    assert numbers(cut / "clients.csv").equals(numbers(whole / "clients.csv"))
    plain, _ = run_small(small_experiment(tmp_path / "plain"))
    assert not numbers(plain / "rounds.csv")["target_loss"].equals(numbers(whole / "rounds.csv")["target_loss"])


def test_a_broadcast_is_there_in_the_prelude_and_made_again_after_it(tmp_path, monkeypatch):
    """Before round 1 the model has not changed; round 1 receives the change that the prelude has made.

    FedCM's D is a mean gradient of a round, and a prelude is none.
    """
    banks = (LastMove(), GlobalDirection())
    row = replace(methods.METHODS["csac"], banks=banks, terms=(Reading(),), reports=(GradientCount(),))
    monkeypatch.setitem(methods.METHODS, "prelude", row)
    noted.clear()
    _, grid = run_small(small_experiment(tmp_path, "prelude", train={"rounds": 1}))
    sent = {
        message.content.config_records["config"]["phase"]: message.content.array_records
        for message, _ in grid.seen
        if message.metadata.message_type == "train"
    }
    assert not record_to_arrays(sent["acquire"]["move"])["bias"].any()
    assert record_to_arrays(sent["train"]["move"])["bias"].any()
    assert len(sent["acquire"]["momentum"]) == len(sent["train"]["momentum"]) == 0
