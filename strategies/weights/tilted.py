"""TERM: clients count more where the loss of the received model is higher, by an exponential tilt."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from fedsim.settings.tuned import DECADE, Tuned
from strategies.parts import ServerRound, Update, Weights
from strategies.weights.by_examples import ByExamples


def tilted(shares: Mapping[str, float], losses: Mapping[str, float], t: float) -> dict[str, float]:
    """p_k e^{t F_k} / sum_j p_j e^{t F_j} of each client; t F_k is shifted by its maximum, which changes nothing."""
    exponents = {client: math.log(share) + t * losses[client] for client, share in shares.items() if share > 0}
    largest = max(exponents.values())
    powers = {client: math.exp(exponents[client] - largest) if client in exponents else 0.0 for client in shares}
    total = math.fsum(powers.values())
    return {client: power / total for client, power in powers.items()}


@dataclass(frozen=True)
class Tilted(Weights):
    """w_k = p_k e^{t F_k(theta)} / sum_j p_j e^{t F_j(theta)}, with p_k = n_k / sum_j n_j.

    Source: TERM (Li et al., ICLR 2021), equation 3 with clients as groups: the gradient of (1/t) log sum_k p_k e^{t
    F_k} is the mean of the clients' gradients with these weights. F_k is the mean training loss of the received model
    in eval mode (part `received_loss`), of the same round. The paper's stochastic form keeps a moving average of the
    normalizer over batches, which exact losses of all examples do not need. `t = 0` gives FedAvg. A negative t turns to
    the clients with a low loss, which is the paper's defence against outliers.

    t: the tilt; towards infinity the worst client alone counts
    """

    t: Annotated[float, Field(allow_inf_nan=False), Tuned("log:0.1:10", DECADE)] = 1.0
    requires: ClassVar[dict[str, str]] = {"reports": "received_loss"}
    needs: ClassVar[tuple[str, ...]] = ("received_loss",)
    with_few: ClassVar[str] = "the weights of so few clients follow who was drawn more than who has a high loss"

    def weigh(self, updates: Sequence[Update], server: ServerRound) -> dict[str, float]:
        """The tilted weights of the clients that replied."""
        losses = {update.client: update.metrics["received_loss"] for update in updates}
        shares = ByExamples().known({update.client: update.examples for update in updates})
        return tilted(shares, losses, self.t)
