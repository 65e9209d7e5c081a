"""Agnostic federated learning: clients get more weight where the loss of the global model is higher."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from fedsim.settings.tuned import Tuned
from strategies.aggregate import project_simplex
from strategies.parts import ServerRound, Update, Weights


@dataclass(frozen=True)
class AgnosticWeights(Weights):
    """lambda <- projection onto the simplex of lambda + gamma (F_1(theta), ..., F_N(theta)); p_k are taken from lambda.

    Source: AFL (Mohri et al., ICML 2019): min over theta, max over lambda of sum_k lambda_k F_k(theta). lambda starts
    uniform, and these weights are used in the first round. F_k is the mean training loss of the global model in eval
    mode (part `received_loss`). A client measures it on the model that it receives. The loss of the model after round t
    thus arrives with the replies of round t + 1, and lambda is moved before those are averaged. This is the paper's
    order without an extra message. A client that did not reply adds no loss; p_k are renormalized over those that
    replied. `gamma = 0` gives FedAvg with uniform weights.

    gamma: the step size of lambda, which must suit the size of the loss; 0.01 in MarsFL and FedDG_Benchmark
    """

    gamma: Annotated[float, Field(ge=0), Tuned("log:0.001:0.1", "DomainBed (GroupDRO)")] = 0.01
    requires: ClassVar[dict[str, str]] = {"reports": "received_loss"}
    needs: ClassVar[tuple[str, ...]] = ("received_loss",)
    with_few: ClassVar[str] = "the weights of so few clients follow who was drawn more than who has a high loss"

    def weigh(self, updates: Sequence[Update], server: ServerRound) -> dict[str, float]:
        """Moves lambda by the losses of the model at the start of this round, then renormalizes over the updates."""
        lam = server.state.setdefault("lambda", {client: 1 / len(server.clients) for client in server.clients})
        if self.gamma > 0 and server.round > 1:
            losses = {update.client: update.metrics["received_loss"] for update in updates}
            point = [lam[client] + self.gamma * losses.get(client, 0.0) for client in lam]
            lam = dict(zip(lam, map(float, project_simplex(np.array(point))), strict=True))
        server.state["lambda"] = lam
        total = math.fsum(lam[update.client] for update in updates)
        if total <= 0:  # all clients that replied have 0, so that they get equal weights
            return {update.client: 1 / len(updates) for update in updates}
        return {update.client: lam[update.client] / total for update in updates}
