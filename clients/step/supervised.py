"""The standard local step: forward, loss plus terms, backward, optimizer."""

from dataclasses import dataclass
from typing import ClassVar

from clients.parts import LocalRound, Step, StepFunction
from fedsim.tasks import ANY_TASK


@dataclass(frozen=True)
class SupervisedStep(Step):
    """L = CE(h(f(x)), y) + sum of terms, one optimizer step (FedAvg's local step)."""

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK

    def begin(self, round: LocalRound) -> StepFunction:
        """Step function over `round.net` and `round.optimizer`; returns the detached total loss."""
        return lambda batch: round.apply_gradients(round.loss_of(batch))
