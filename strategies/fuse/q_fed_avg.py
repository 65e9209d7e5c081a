"""q-FedAvg: clients with a high loss move the model further, so that their accuracies become more alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from fedsim.parts.facts import Fact
from fedsim.settings.tuned import Tuned
from strategies.aggregate import Arrays, weighted_mean
from strategies.parts import ArrayDict, Fuse, RefusedUpdateError, ServerRound, Update
from strategies.tools.moves import mean_move, moved, moves
from strategies.wire import flower_strategies as flower


@dataclass(frozen=True)
class QFedAvg(Fuse):
    """theta <- theta + sum_k F_k^q L delta_k / sum_k (q F_k^(q-1) ||L delta_k||^2 + L F_k^q), with L = 1/lr.

    Source: Li et al., ICLR 2020 (q-FFL), with the numbers of Flower's QFedAvg. delta_k = theta_k - theta on the shared
    parameters, and F_k is the client's mean training loss of the round; the paper takes the loss of the received model.
    lr = `train.lr` is the local learning rate before any schedule. All other tensors take their weighted mean. Clients
    are not weighted by size. `q = 0` gives FedAvg with uniform weights for the parameters.

    q: how much high losses count; the paper tries 0.1 to 10
    """

    q: Annotated[float, Field(ge=0), Tuned("log:0.1:10", "the paper")] = 0.1
    breaks = (Fact.WEIGHTED_MEAN, Fact.CLIENT_WEIGHTS)
    needs: ClassVar[tuple[str, ...]] = (flower.LOSS,)
    with_few: ClassVar[str] = (
        "with one client the losses only shorten its step, and with two they say little about who is worse off"
    )

    def fuse(self, updates: Sequence[Update], weights: Mapping[str, float], server: ServerRound) -> ArrayDict:
        """Parameters by q-FedAvg, tensor by tensor. A negative loss is refused."""
        losses = {update.client: update.metrics[flower.LOSS] for update in updates}
        for client, loss in losses.items():
            if loss < 0:
                raise RefusedUpdateError(client, f"its training loss is {loss:g}, and q-FedAvg needs one of at least 0")
        deltas = moves(updates, server)
        coefficients = self.coefficients(list(losses.values()), deltas, 1.0 / server.experiment.train.lr)
        fused = weighted_mean([update.arrays for update in updates], [weights[update.client] for update in updates])
        return fused | {name: moved(name, mean_move(deltas, coefficients, name), server) for name in deltas[0]}

    def coefficients(self, losses: Sequence[float], deltas: Sequence[Arrays], lipschitz: float) -> np.ndarray:
        """F_k^q L / sum_j (q F_j^(q-1) ||L delta_j||^2 + L F_j^q) for each client, with 1e-10 added to F as in Flower,
        which has all models in memory: its `aggregate_train` gives the same numbers."""
        norms = [sum(float(np.sum(np.square(lipschitz * delta[name]))) for name in delta) for delta in deltas]
        loss = np.asarray(losses) + 1e-10
        heights = self.q * loss ** (self.q - 1) * norms + lipschitz * loss**self.q
        return loss**self.q * lipschitz / heights.sum()
