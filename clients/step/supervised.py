"""The standard local step: forward, loss plus terms, backward, optimizer."""

from dataclasses import dataclass
from typing import ClassVar

from clients.parts import LocalRound, Step, StepFunction
from fedsim.common.tasks import ANY_TASK


@dataclass(frozen=True)
class SupervisedStep(Step):
    """L = CE(h(f(x)), y) + the sum of the terms, and one optimizer step (FedAvg's local step)."""

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK
    side_by_side: ClassVar[bool] = True

    def begin(self, round: LocalRound) -> StepFunction:
        """A step function over `round.net` and `round.optimizer`, which returns the total loss without a graph."""
        return lambda batch: round.apply_gradients(round.loss_of(batch))
