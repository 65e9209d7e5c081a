"""FedHEAL's weights: clients whose models move further gain weight from round to round."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from fedsim.settings.tuned import Tuned
from strategies.parts import ServerRound, Update, Weights
from strategies.tools.moves import moves


@dataclass(frozen=True)
class DomainDiversity(Weights):
    """D_k <- (1 - beta) D_k + beta d_k / sum_j d_j, then w_k <- w_k + D_k; p_k = w_k / sum_j w_j of those that reply.

    d_k is the sum over the parameter tensors of ||theta_k - theta||, a sum of norms and not the norm of all. w starts
    at 1/K and D at 0.

    Source: FedHEAL (Chen et al., CVPR 2024), its federated aggregation by domain diversity, from the released code
    (yuhangchen0/FedHEAL 770e094): w itself is never normalized, so that later rounds move it less. A client that did
    not reply keeps w and D. `beta = 0` gives FedAvg with uniform weights.

    beta: the share of the round in the moving average D, 0.4 in the paper
    """

    beta: Annotated[float, Field(ge=0, le=1), Tuned("0.2,0.4,0.6,0.8", "ours: around the paper's 0.4")] = 0.4
    with_few: ClassVar[str] = "the weights of so few clients follow who was drawn more than who differs"

    def weigh(self, updates: Sequence[Update], server: ServerRound) -> dict[str, float]:
        """Moves w by the lengths of this round, then renormalizes it over the updates."""
        weights = server.state.setdefault("w", {client: 1.0 / len(server.clients) for client in server.clients})
        changes = server.state.setdefault("change", dict.fromkeys(server.clients, 0.0))
        lengths = {}
        for update, delta in zip(updates, moves(updates, server), strict=True):
            lengths[update.client] = math.fsum(float(np.linalg.norm(delta[name])) for name in delta)
        total = math.fsum(lengths.values())
        for client, length in lengths.items() if total > 0 else ():
            changes[client] = (1 - self.beta) * changes[client] + self.beta * length / total
            weights[client] += changes[client]
        mass = math.fsum(weights[update.client] for update in updates)
        return {update.client: weights[update.client] / mass for update in updates}
