"""FedGaLA's client term: a tensor is not trained in a step where its gradient disagrees with its last global move."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from clients.optimizers import zero_momentum
from clients.parts import LocalRound, Term
from clients.tools.last_move import last_move
from fedsim.common.tasks import ANY_TASK
from fedsim.parts.facts import Fact

SMALL = 1e-8  # smaller norms are read as this one


def cosines(first: list[Tensor], second: list[Tensor]) -> Tensor:
    """The cosine of each pair of tensors, read as vectors; 0 where one of them is the zero vector."""
    products = torch.stack([(a * b).sum() for a, b in zip(first, second, strict=True)])
    norms = [torch.stack(torch._foreach_norm(vectors)).clamp_min(SMALL) for vectors in (first, second)]
    return products / (norms[0] * norms[1])


@dataclass(frozen=True)
class GradientAlignment(Term):
    """Before every step, the gradient g of a parameter tensor is dropped unless cos(-g, m) >= tau.

    m is the last move of this tensor in the global model.

    Source: FedGaLA (Pourpanah et al., AAAI 2025). We use its rule for gradients with a supervised loss; the training in
    the paper is unsupervised. m is the difference of the two models that this client received last. In a client's first
    round no gradient is dropped. A tensor with a dropped gradient gets neither weight decay nor momentum in that step.
    The rule looks at shared parameters. `tau = -1` gives FedAvg's client bit for bit.

    tau: the smallest cosine with which a gradient is kept
    variant: `official` compares g in place of -g, as the released code does; it drops the gradients of steps that would
    continue in the global direction
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK
    order: ClassVar[int] = 3

    tau: Annotated[float, Field(ge=-1, le=1)] = 0.0
    variant: Literal["descent", "official"] = "descent"
    assumes = (Fact.WHOLE_MODEL,)
    columns: ClassVar[tuple[str, ...]] = ("dropped_tensors",)

    def begin(self, round: LocalRound) -> None:
        """Registers the rule, which drops gradients before every step. It adds nothing to the loss."""
        if self.tau == -1:
            return
        move = last_move(round)
        if move is None:
            return
        zero_momentum(round.optimizer)
        parameters, sign = round.shared_parameters(), -1 if self.variant == "descent" else 1

        def leave_out() -> None:
            moving = [name for name, parameter in parameters.items() if parameter.grad is not None]
            if not moving:
                return
            gradients = [grad for name in moving if (grad := parameters[name].grad) is not None]
            aligned = (sign * cosines(gradients, [move[name] for name in moving]) >= self.tau).tolist()
            round.tally("dropped_tensors", 1 - sum(aligned) / len(aligned))
            for name, keep in zip(moving, aligned, strict=True):
                if not keep:
                    parameters[name].grad = None

        round.before_step.append(leave_out)
