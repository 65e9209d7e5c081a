"""The standard update: one gradient."""

from dataclasses import dataclass
from typing import ClassVar

from clients.parts import LocalRound, LocalUpdate, UpdateFunction


@dataclass(frozen=True)
class OneGradient(LocalUpdate):
    """The optimizer gets the gradient g(w) of the local loss with terms (FedAvg)."""

    side_by_side: ClassVar[bool] = True
    assumes = ()

    def begin(self, round: LocalRound) -> UpdateFunction:
        """Backward pass and optimizer's step."""
        return lambda loss: round.apply_gradients(loss())
