"""FedCM's client term: it mixes every gradient with the last direction of the global model."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from clients.parts import LocalRound, Term
from fedsim.common.tasks import ANY_TASK
from fedsim.parts.facts import Fact
from fedsim.settings.tuned import DECADE, Tuned


@dataclass(frozen=True)
class ClientMomentum(Term):
    """The optimizer gets u = alpha g + (1 - alpha) D in place of the gradient g, over the shared parameters.

    Source: FedCM (Xu et al. 2021, arXiv 2106.10874). With sharpness-aware steps it is MoFedSAM (Qu et al., ICML 2022).
    D is the server's record `momentum`: the negative of the global model's last move, divided by the number of
    gradients in it. In round 1 D is 0, so that the steps of that round are alpha times as long as FedAvg's, as in the
    released code. `alpha = 1` gives FedAvg. A parameter with a multiple of the learning rate (BIN's gate) has moved by
    that multiple, by which the client divides its D. A proximal term is a part of g, so that alpha multiplies its pull
    too; `gradient_count` counts that.

    D contains the server's learning rate: with `server_step` and its eta, D is eta times as long. With eta (1 - alpha)
    >= 1, which is eta > 1.11 for the default alpha, it grows from round to round without bound. For this reason
    `global_direction` refuses Flower's server optimizers, `dynamic_correction`, which adds all past moves, and
    `gradient_matching`, which makes equal moves 1.2 times as long (1.5 times without `rescale`).

    alpha: the weight of the client's own gradient, 0.1 in the released scripts
    variant: `official` is the released code of MoFedSAM, which leaves alpha out of the first summand: u = g + (1 -
    alpha) D
    first_round: `plain` takes u = g as long as there is no D
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK
    order: ClassVar[int] = 2

    side_by_side: ClassVar[bool] = True

    alpha: Annotated[float, Field(gt=0, le=1), Tuned("log:0.01:1", DECADE)] = 0.1
    variant: Literal["paper", "official"] = "paper"
    first_round: Literal["scaled", "plain"] = "scaled"
    requires: ClassVar[dict[str, str]] = {"banks": "global_direction"}
    assumes = (Fact.WHOLE_MODEL,)

    def begin(self, round: LocalRound) -> None:
        """Registers the mixing before every step. It adds nothing to the loss."""
        if self.alpha == 1:
            return
        direction = round.tensors("momentum", "client_momentum")
        if not direction and self.first_round == "plain":
            return
        share = self.alpha if self.variant == "paper" else 1.0
        round.pull *= share
        parameters = round.shared_parameters()
        rates = {parameter: group["lr"] for group in round.optimizer.param_groups for parameter in group["params"]}
        for name, parameter in parameters.items():
            if name in direction and round.lr > 0 and (scale := rates.get(parameter, round.lr) / round.lr) != 1:
                direction[name] /= scale

        def mix() -> None:
            gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
            if gradients:
                torch._foreach_mul_(list(gradients.values()), share)
            if gradients and direction:
                leaning = [direction[name] for name in gradients]
                torch._foreach_add_(list(gradients.values()), leaning, alpha=1 - self.alpha)

        round.before_step.append(mix)
