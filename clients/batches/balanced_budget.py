"""The same number of examples per round on every client (FedSB)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from clients.batches.shuffled import Shuffled, chunks
from clients.parts import Batches, LocalRound
from fedsim.common.errors import UserError
from fedsim.common.tasks import ANY_TASK
from fedsim.settings import TrainSettings
from fedsim.settings.experiment import Experiment


@dataclass(frozen=True)
class BalancedBudget(Batches):
    """Exactly `budget` examples per round on every client, however many it holds (a last batch of one is left out).

    Source: FedSB (ICASSP 2025). A client with more examples draws them without replacement, anew in each round. A
    client with fewer takes whole copies of its examples and a random remainder. With `unit="batches"` the budget counts
    batches of `train.batch_size`, as in the official code. `budget = 0` gives FedAvg. The budget is that of a round: a
    prelude (CSAC's acquisition) has the amount that its own settings say. A budget of one image has no batch, so that
    nothing is trained: it measures what a round costs without training.

    budget: the number of examples, or of batches, of a round
    unit: what the budget counts
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK

    balanced: ClassVar[bool] = True

    budget: Annotated[int, Field(ge=0)] = 2880
    unit: Literal["examples", "batches"] = "examples"

    def check(self, experiment: Experiment) -> None:
        """A budget without a batch cannot be continued to FedAvg's amount."""
        super().check(experiment)
        if self.budget == 1 and self.unit == "examples" and experiment.train.budget != "paper":
            raise UserError(
                "balanced_budget.budget = 1 has no batch, because batch norm needs two images, and "
                f"train.budget = {experiment.train.budget!r} cannot make it longer; take 2 images or more"
            )

    def indices(self, examples: int, round: LocalRound, train: TrainSettings) -> Iterator[np.ndarray]:
        """One pass over the budget: ceil(S/B) batches on every client, without a last batch of one image."""
        if self.budget == 0 or round.phase != "train":
            yield from Shuffled().indices(examples, round, train)
            return
        size = self.budget * train.batch_size if self.unit == "batches" else self.budget
        yield from chunks(self.draw(examples, size, round.rng("batches")), train.batch_size)

    @staticmethod
    def draw(examples: int, size: int, rng: np.random.Generator) -> np.ndarray:
        """`size` shuffled indices: floor(size/n) copies of all n examples, and `size mod n` distinct further ones."""
        copies, rest = divmod(size, examples)
        order = np.concatenate([np.tile(np.arange(examples), copies), rng.permutation(examples)[:rest]])
        return rng.permutation(order)
