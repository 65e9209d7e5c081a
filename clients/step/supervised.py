"""The standard local step: forward, loss plus terms, backward, optimizer."""

from dataclasses import dataclass

from clients.parts import LocalRound, Step, StepFunction


@dataclass(frozen=True)
class SupervisedStep(Step):
    """L = CE(h(f(x)), y) + sum of terms, one optimizer step (FedAvg's local step)."""

    def begin(self, round: LocalRound) -> StepFunction:
        """Step function over `round.net` and `round.optimizer`; returns the detached total loss."""
        return lambda batch: round.apply_gradients(round.loss_of(batch))
