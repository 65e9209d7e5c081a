"""FedCM's client: every gradient leans towards the global model's last direction."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from clients.parts import LocalRound, Term


@dataclass(frozen=True)
class ClientMomentum(Term):
    """The optimizer gets u = alpha g + (1 - alpha) D, over the shared parameters.

    FedCM (Xu et al. 2021, arXiv 2106.10874), frontier.md 2; with sharpness-aware steps MoFedSAM (Qu et al., ICML 2022).
    D is the server's record `momentum`: minus the global model's last move, per gradient. In round 1 D = 0, so that its
    steps are alpha times as long as FedAvg's, as in the released code. `alpha = 1` gives FedAvg.

    alpha: share of the client's own gradient; .1 in the released scripts
    variant: `official` is the released MoFedSAM, which leaves alpha out of the first summand: u = g + (1 - alpha) D
    first_round: `plain` takes u = g as long as there is no D
    """

    alpha: Annotated[float, Field(gt=0, le=1)] = 0.1
    variant: Literal["paper", "official"] = "paper"
    first_round: Literal["scaled", "plain"] = "scaled"
    requires: ClassVar[dict[str, str]] = {"banks": "global_direction"}
    whole: ClassVar[bool] = True

    def begin(self, round: LocalRound) -> None:
        """Mixes before every step; there is nothing to add to the loss."""
        if self.alpha == 1 or round.phase != "train":
            return
        direction = round.tensors("momentum", "client_momentum")
        if not direction and self.first_round == "plain":
            return
        own = self.alpha if self.variant == "paper" else 1.0
        parameters = round.shared_parameters()

        def mix() -> None:
            gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
            if gradients:
                torch._foreach_mul_(list(gradients.values()), own)
            if gradients and direction:
                leaning = [direction[name] for name in gradients]
                torch._foreach_add_(list(gradients.values()), leaning, alpha=1 - self.alpha)

        round.before_step.append(mix)
