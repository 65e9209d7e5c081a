"""FedGaLA's client: tensors whose gradient disagrees with the global model's last move wait."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from clients.last_move import last_move
from clients.optimizers import zero_momentum
from clients.parts import LocalRound, Term

SMALL = 1e-8  # smallest norm


def cosines(first: list[Tensor], second: list[Tensor]) -> Tensor:
    """cos of each pair of tensors, read as vectors; 0 with a zero vector."""
    products = torch.stack([(a * b).sum() for a, b in zip(first, second, strict=True)])
    norms = [torch.stack(torch._foreach_norm(vectors)).clamp_min(SMALL) for vectors in (first, second)]
    return products / (norms[0] * norms[1])


@dataclass(frozen=True)
class GradientAlignment(Term):
    """Before every step, a parameter tensor with gradient g is left as it is unless cos(-g, m) >= tau; m is its last
    global move.

    FedGaLA (Pourpanah et al., AAAI 2025), frontier.md 5, its rule for gradients under a supervised loss; the paper's
    own training is unsupervised. m is the difference of the two models that this client received last; there is no
    filter in its first round. A tensor that is left out gets no decay and no momentum either. It looks at shared
    parameters. `tau = -1` gives FedAvg's client bit for bit.

    tau: cosine from which a tensor takes part
    variant: `official` compares g and not -g, as the released code does: it drops steps that go on in the global
        direction
    """

    tau: Annotated[float, Field(ge=-1, le=1)] = 0.0
    variant: Literal["descent", "official"] = "descent"
    whole: ClassVar[bool] = True

    def begin(self, round: LocalRound) -> None:
        """Takes gradients away before every step; there is nothing to add to the loss."""
        if self.tau == -1 or round.phase != "train":
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
            gradients = [parameters[name].grad for name in moving]
            aligned = (sign * cosines(gradients, [move[name] for name in moving]) >= self.tau).tolist()
            round.tally("dropped_tensors", 1 - sum(aligned) / len(aligned))
            for name, keep in zip(moving, aligned, strict=True):
                if not keep:
                    parameters[name].grad = None

        round.before_step.append(leave_out)
