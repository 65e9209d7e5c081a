"""The same number of examples of every domain in every batch (DomainBed)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from clients.batches.shuffled import Shuffled
from clients.parts import Batches, LocalRound
from fedsim.common.tasks import ANY_TASK
from fedsim.settings import TrainSettings


@dataclass(frozen=True)
class EqualDomains(Batches):
    """Every batch joins `per_domain` examples of each domain of a client, whatever `train.batch_size` is.

    Source: DomainBed (Gulrajani and Lopez-Paz, ICLR 2021), whose empirical risk minimization is DeepAll. Each domain's
    examples come in passes, each in a new order, so that a small domain comes more often than a large one. A round has
    `train.epochs` times the training images of all domains in whole batches (at least one), or the steps of
    `train.iterations`. With another budget (`train.budget`) it has as many whole batches as fit into the budget, at
    least one. A longer budget repeats the round's batches in a new order. A client has several domains where data are
    pooled or mixed (`data.mix`). With a single domain the batches are `shuffled`.

    per_domain: the number of examples of each domain in a batch
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK
    whole: ClassVar[bool] = True

    per_domain: Annotated[int, Field(ge=1)] = 32

    def indices(self, examples: int, round: LocalRound, train: TrainSettings) -> Iterator[np.ndarray]:
        """The examples of each domain side by side."""
        names, domains = np.unique(round.data.domains, return_inverse=True)
        if len(names) == 1:
            yield from Shuffled().indices(examples, round, train)
            return
        rng = round.rng("batches")
        domains = np.resize(domains, examples)  # copies of an example are of its domain
        steps = train.iterations or max(train.epochs * examples // (self.per_domain * len(names)), 1)
        columns = [
            _passes(np.flatnonzero(domains == domain), steps * self.per_domain, rng) for domain in range(len(names))
        ]
        yield from np.concatenate([column.reshape(steps, self.per_domain) for column in columns], axis=1)


def _passes(items: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` items: passes over all of them, each in a new order."""
    return np.concatenate([rng.permutation(items) for _ in range(-(-count // len(items)))])[:count]
