"""A server part that trains and a bank that the server makes: resumed exactly, and seen by the clients."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from support import Interrupt, numbers, run_small, tiny_experiment

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
        net = server.build_net()
        load_arrays(net, fused, list(fused))
        assert {name for name, _ in net.named_parameters()} == server.parameters
        images = torch.rand(4, 1, 28, 28, generator=server.generator("noise")) + float(server.rng("shift").random())
        net.train()(images).logsumexp(1).mean().backward()
        state = {name: tensor.numpy().copy() for name, tensor in net.state_dict().items()}
        trace = server.arrays.setdefault("trace", np.zeros_like(state["head.bias"]))
        trace += net.head.bias.grad.numpy()
        server.state["rounds"] = server.state.get("rounds", 0) + 1
        state["head.bias"] -= 0.1 * trace * server.state["rounds"]
        return {name: state[name] for name in fused}


@dataclass(frozen=True)
class LastMove(Broadcast):
    """The last global move of the head's bias, zero before round 1."""

    name: ClassVar[str] = "move"

    def make(self, server):
        return {"bias": server.current["head.bias"] - server.previous["head.bias"]}


noted = []


@dataclass(frozen=True)
class Reading(Term):
    """Adds nothing to the loss; notes the round, the broadcast that came and the model's bias."""

    def begin(self, round):
        bias = round.net.state_dict()["head.bias"].numpy().copy()
        noted.append((round.round, round.record("move", "reading")["bias"].copy(), bias))


@pytest.fixture
def row(monkeypatch):
    """row(recipe): a row of the table."""
    noted.clear()
    close_workspaces()
    return lambda recipe: monkeypatch.setitem(methods.METHODS, "own", recipe)


def test_a_server_that_trains_is_resumed_exactly_and_broadcasts_its_moves(row, tmp_path):
    """Each client receives the last change of the global model; after a kill in round 2 the tables are the same."""
    row(Recipe(refine=(Distil(),), banks=(LastMove(),), terms=(Reading(),)))
    whole, _ = run_small(tiny_experiment(tmp_path / "whole", "own", 3))
    biases = {round: bias for round, _, bias in noted}
    for round, move, _ in noted:
        np.testing.assert_array_equal(move, biases[round] - biases[round - 1] if round > 1 else 0 * move)
    assert (biases[3] != biases[2]).all()
    assert set(numbers(whole / "clients.csv").query("round > 0")["bytes_down_move"]) == {40}
    with pytest.raises(KeyboardInterrupt):
        run_small(tiny_experiment(tmp_path / "cut", "own", 3), Interrupt(2))
    close_workspaces()
    cut, _ = run_small(tiny_experiment(tmp_path / "cut", "own", 3))
    for file in ("rounds.csv", "clients.csv"):
        assert numbers(cut / file).equals(numbers(whole / file))


def test_a_broadcast_is_there_in_the_prelude_and_made_again_after_it(row, tmp_path):
    """Before round 1 the model has not changed; round 1 receives the change that the prelude has made.

    FedCM's D is a mean gradient of a round, and a prelude is none.
    """
    banks = (LastMove(), GlobalDirection())
    row(replace(methods.METHODS["csac"], banks=banks, terms=(Reading(),), reports=(GradientCount(),)))
    _, grid = run_small(tiny_experiment(tmp_path, "own", 1))
    sent = {message.content["config"]["phase"]: message.content.array_records for message, _ in grid.seen}
    assert not record_to_arrays(sent["acquire"]["move"])["bias"].any()
    assert record_to_arrays(sent["train"]["move"])["bias"].any()
    assert len(sent["acquire"]["momentum"]) == len(sent["train"]["momentum"]) == 0
