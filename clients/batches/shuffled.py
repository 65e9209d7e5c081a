"""The standard batches: shuffled local epochs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from clients.parts import Batches, LocalRound
from fedsim.common.tasks import ANY_TASK
from fedsim.settings import TrainSettings


def chunks(order: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Consecutive batches. A last batch of one example is dropped, because batch norm needs two."""
    for start in range(0, len(order), size):
        batch = order[start : start + size]
        if len(batch) > 1:
            yield batch


@dataclass(frozen=True)
class Shuffled(Batches):
    """Every local epoch is a new permutation of the client's examples.

    With `train.iterations` there are as many permutations as those steps need.
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK

    def indices(self, examples: int, round: LocalRound, train: TrainSettings) -> Iterator[np.ndarray]:
        """`train.epochs` passes, or exactly `train.iterations` batches."""
        rng = round.rng("batches")
        if not train.iterations:
            for _ in range(train.epochs):
                yield from chunks(rng.permutation(examples), train.batch_size)
            return
        taken = 0
        while taken < train.iterations:
            for batch in chunks(rng.permutation(examples), train.batch_size):
                yield batch
                taken += 1
                if taken == train.iterations:
                    return
