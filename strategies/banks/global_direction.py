"""FedCM's bank: the last move of the global model, in units of a gradient."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedsim.parts.facts import Fact
from strategies.parts import ArrayDict, Broadcast, ServerRound


@dataclass(frozen=True)
class GlobalDirection(Broadcast):
    """D = -(theta^t - theta^(t-1)) / sum_k p_k a_k eta_k over the shared parameters; empty before the first move.

    Source: FedCM (Xu et al. 2021), where a_k eta_k is the number of local steps times the learning rate. With momentum
    a_k counts the gradients that a step repeats (`clients.optimizers.gradient_count`, our choice); divided by the steps
    alone, D would grow from round to round. The released code takes the steps of the first client. eta_k is the
    learning rate of the round; clients divide the D of parameters that have a multiple of it.
    """

    name: ClassVar[str] = "momentum"
    requires: ClassVar[dict[str, str]] = {"reports": "gradient_count"}
    needs: ClassVar[tuple[str, ...]] = ("gradient_count", "learning_rate")
    assumes = (Fact.SEVERAL_CLIENTS, Fact.CLIENTS_MOVE)

    def make(self, server: ServerRound) -> ArrayDict:
        """D of the round that ends. A round with the learning rate 0 has none. A prelude has none either: it is no
        round, so that D is 0 in round 1 with it too."""
        if server.round == 0:
            return {}
        lengths = {u.client: u.metrics["gradient_count"] * u.metrics["learning_rate"] for u in server.updates}
        length = math.fsum(server.weights[client] * value for client, value in lengths.items())
        if not length > 0:
            return {}
        direction = {}
        for name in sorted(server.parameters):
            move = np.asarray(server.current[name], np.float64) - server.previous[name]
            direction[name] = np.asarray(-move / length, dtype=server.previous[name].dtype)
        return direction
