"""The standard objective: the task's loss of the batch."""

from dataclasses import dataclass
from typing import ClassVar

from clients.parts import LocalRound, Objective, StepFunction
from fedsim.common.tasks import ANY_TASK


@dataclass(frozen=True)
class SupervisedLoss(Objective):
    """CE(h(f(x)), y), or the soft Dice loss of masks (FedAvg)."""

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK
    side_by_side: ClassVar[bool] = True
    signed_loss: ClassVar[bool] = False
    assumes = ()

    def begin(self, round: LocalRound) -> StepFunction:
        """The network's forward pass."""
        return round.forward
