"""q-FedAvg: clients with a high loss move the model further, so that the accuracies of the clients become more
alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from strategies.aggregate import weighted_mean
from strategies.moves import moves
from strategies.parts import Fuse, RefusedUpdateError, ServerRound, Update
from strategies.wire import flower_strategies as flower


@dataclass(frozen=True)
class QFedAvg(Fuse):
    """theta <- theta + sum_k F_k^q L delta_k / sum_k (q F_k^(q-1) ||L delta_k||^2 + L F_k^q), with L = 1/lr.

    Source: Li et al., ICLR 2020 (q-FFL), by Flower's QFedAvg. delta_k = theta_k - theta on the shared parameters, F_k
    is the client's mean training loss of the round (the paper takes the loss of the received model), and lr =
    `train.lr` is the local learning rate before any schedule. All other tensors take their weighted mean. Clients are
    not weighted by size. `q = 0` gives FedAvg with uniform weights for the parameters.

    q: how much high losses count; the paper tries 0.1 to 10
    """

    q: Annotated[float, Field(ge=0)] = 0.1
    uses_weights: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = (flower.LOSS,)

    def fuse(
        self, updates: Sequence[Update], weights: Mapping[str, float], server: ServerRound
    ) -> dict[str, np.ndarray]:
        """Parameters by q-FedAvg on the updates, which start from 0. A negative loss is refused."""
        losses = {update.client: update.metrics[flower.LOSS] for update in updates}
        for client, loss in losses.items():
            if loss < 0:
                raise RefusedUpdateError(client, f"its training loss is {loss:g}, and q-FedAvg needs one of at least 0")
        deltas = moves(updates, server)
        rule = flower.QFedAvg(client_learning_rate=server.experiment.train.lr, q=self.q)
        rule.current_arrays = flower.record({name: np.zeros_like(delta) for name, delta in deltas[0].items()})
        moved = flower.aggregate(
            rule, server.round, deltas, [{flower.WEIGHT: 1, flower.LOSS: loss} for loss in losses.values()]
        )
        states = [update.arrays for update in updates]
        fused = weighted_mean(states, [weights[update.client] for update in updates])
        for name, move in moved.items():
            fused[name] = np.asarray(server.previous[name] + move, dtype=fused[name].dtype)
        return fused
