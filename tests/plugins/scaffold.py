"""SCAFFOLD, Option II (Karimireddy et al., ICML 2020): control variates take out what a client's own data pull."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from clients.parts import LocalRound, Term
from fedsim import Fact
from fedsim.common.errors import UserError
from fedsim.methods.recipe import Recipe
from fedsim.settings.experiment import Experiment
from strategies.banks.checks import misfit
from strategies.parts import SERVER, Arrays, Bank, Entries, ServerRound


@dataclass(frozen=True)
class ControlledGradient(Term):
    """y <- y - eta (g(y) + c - c_k) in each of tau steps; then c_k+ = c_k - c + (w - y) / (tau eta).

    w: the received model; c: the server's control variate, c_k: this client's, zero at first, one tensor per trainable
    parameter. c_k+ - c_k goes to the server. Plain SGD with a constant learning rate within the round.
    """

    bank: ClassVar[str] = "control"
    requires: ClassVar[dict[str, str]] = {"banks": "control"}
    assumes = (Fact.WHOLE_MODEL,)
    discloses: ClassVar[str] = "each client's mean gradient, which tells more than a weight difference"

    def check(self, experiment: Experiment) -> None:
        """(w - y) / (tau eta) is the mean gradient under plain SGD alone."""
        train = experiment.train
        if train.optimizer != "sgd" or train.momentum or train.weight_decay:
            raise UserError("scaffold needs train.optimizer = 'sgd' with train.momentum = 0 and train.weight_decay = 0")

    def begin(self, round: LocalRound) -> None:
        """Adds c - c_k to every gradient before the optimizer's step."""
        parameters = round.parameters()
        zero = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        c = round.tensors(self.bank, "scaffold") if round.records.get(self.bank) else zero
        own = round.store.get("control") or zero
        start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        round.scratch["control"] = (c, own, start)

        def correct() -> None:
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    parameter.grad += c[name] - own[name].to(c[name].device)

        round.before_step.append(correct)

    def end(self, round: LocalRound) -> None:
        """The client's new control variate is kept, its change is sent."""
        c, own, start = round.scratch["control"]
        scale, new = 1.0 / (round.steps * round.lr), {}
        for name, parameter in round.parameters().items():
            new[name] = own[name].to(c[name].device) - c[name] + (start[name] - parameter.detach()) * scale
        round.store.put("control", new)
        round.send(self.bank, {name: new[name] - own[name].to(new[name].device) for name in new})


@dataclass(frozen=True)
class Control(Bank):
    """c <- c + 1/N sum of the changes c_k+ - c_k of the clients that delivered, N all clients of the federation.

    That is (|S|/N) times their mean, for a share |S|/N that takes part in the round.
    """

    name: ClassVar[str] = "control"
    when: ClassVar[str] = "round"

    def accept(self, client: str, arrays: Arrays, server: ServerRound) -> str:
        """The changes have the names and shapes of the model's parameters."""
        return misfit(arrays, {name: server.previous[name] for name in server.parameters})

    def merge(self, bank: Entries, entries: Entries, server: ServerRound) -> dict[str, Arrays]:
        """The server's control variate, kept under the owner SERVER."""
        c = dict(bank.get(SERVER, {}))
        for change in entries.values():
            c = {name: np.float32(c.get(name, 0.0) + array / len(server.clients)) for name, array in change.items()}
        return {SERVER: c}

    def hand_out(self, bank: Entries, client: str, server: ServerRound) -> Arrays:
        """c, the same for all clients; empty at first."""
        return bank.get(SERVER, {})


scaffold = Recipe(terms=(ControlledGradient(),), banks=(Control(),), paper="Karimireddy et al., ICML 2020")
