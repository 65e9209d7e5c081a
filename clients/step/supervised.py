"""The plain local step: the objective with the terms gives the loss, and the update moves the weights by it."""

from dataclasses import dataclass
from typing import ClassVar

from clients.parts import LocalRound, Step, StepFunction
from fedsim.common.tasks import ANY_TASK


@dataclass(frozen=True)
class SupervisedStep(Step):
    """update(L), where L is the objective and the sum of the terms; with their defaults it is FedAvg's local step."""

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK
    side_by_side: ClassVar[bool] = True
    signed_loss: ClassVar[bool] = False
    breaks = ()

    def begin(self, round: LocalRound) -> StepFunction:
        """One step of the recipe's update on the recipe's loss."""
        return lambda batch: round.move(lambda: round.loss_of(batch))
