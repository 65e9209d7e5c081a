"""Which pass of a batch in a step is its first, for parts that count what they see."""

from collections.abc import Callable

from clients.parts import Batch, LocalRound


def first_pass(round: LocalRound) -> Callable[[Batch], bool]:
    """A function that says of each pass whether it is the batch's first in this step.

    A sharpness-aware step passes a batch twice, the second time with weights that are nobody's.
    """
    passed: Batch | None = None

    def forget() -> None:
        nonlocal passed
        passed = None

    def first(batch: Batch) -> bool:
        nonlocal passed
        new, passed = batch is not passed, batch
        return new

    round.before_step.append(forget)
    return first
