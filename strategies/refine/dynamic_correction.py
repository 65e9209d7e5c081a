"""FedDyn's server part: it moves the clients' mean further by all past moves."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedsim.parts.facts import Fact
from strategies.parts import ArrayDict, Arrays, Refine, ServerRound
from strategies.tools.moves import mean_move, moves


@dataclass(frozen=True)
class DynamicCorrection(Refine):
    """H <- H + (1/N) sum_k (theta_k - theta); theta <- fused + H over the shared parameters; H starts at 0.

    Source: FedDyn (Acar et al., ICLR 2021). N counts all clients of the federation, drawn or not. All other tensors
    take their fused value, so that the running statistics of batch norm fit the clients' models, and not the model
    after H was added. The paper averages the clients uniformly. H is kept in the checkpoint. Fusions other than the
    weighted mean are refused, and so are Flower's server optimizers, whose moments would add H up once more, and the
    adapters of `mix_ig`: the client's term changes gradients of the main step, which does not train them.
    """

    order: ClassVar[int] = 0
    assumes = (Fact.SEVERAL_CLIENTS, Fact.SINGLE_UPDATES, Fact.WEIGHTED_MEAN, Fact.ONE_STEP)
    replaces = (Fact.CLIENTS_MOVE,)

    def refine(self, fused: Arrays, server: ServerRound) -> ArrayDict:
        """The corrected parameters; H is in float64."""
        deltas, result = moves(server.updates, server), dict(fused)
        for name in deltas[0]:
            change = mean_move(deltas, [1 / len(server.clients)] * len(deltas), name)
            total = server.arrays[name] = server.arrays.get(name, 0.0) + change
            result[name] = np.asarray(fused[name] + total, dtype=fused[name].dtype)
        return result
