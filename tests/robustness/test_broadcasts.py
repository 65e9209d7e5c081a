"""A bank that the server makes: a broadcast, seen by the clients."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from support import numbers, run_small, tiny_experiment

from clients.parts import Term
from clients.reports.gradient_count import GradientCount
from fedsim.methods import table as methods
from fedsim.run.workspace import close_workspaces
from fedsim.tensors.arrays import record_to_arrays
from strategies.banks.global_direction import GlobalDirection
from strategies.parts import Broadcast


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


def test_a_broadcast_is_there_in_the_prelude_and_made_again_after_it(monkeypatch, tmp_path):
    """Before round 1 the model has not changed; each round receives the change that the prelude or the round before
    has made. FedCM's D is a mean gradient of a round, and a prelude is none."""
    banks, reports = (LastMove(), GlobalDirection()), (GradientCount(),)
    own = replace(methods.METHODS["csac"], banks=banks, terms=(Reading(),), reports=reports)
    monkeypatch.setitem(methods.METHODS, "own", own)
    noted.clear()
    close_workspaces()
    folder, grid = run_small(tiny_experiment(tmp_path, "own"))
    sent = {message.content["config"]["phase"]: message.content.array_records for message, _ in reversed(grid.seen)}
    assert not record_to_arrays(sent["acquire"]["move"])["bias"].any()
    assert record_to_arrays(sent["train"]["move"])["bias"].any()
    assert len(sent["acquire"]["momentum"]) == len(sent["train"]["momentum"]) == 0
    biases = {round: bias for round, _, bias in noted}
    for round, move, _ in noted:
        assert round < 2 or np.array_equal(move, biases[2] - biases[1])
    assert (biases[2] != biases[1]).all()
    assert set(numbers(folder / "clients.csv").query("round > 0")["bytes_down_move"]) == {40}
