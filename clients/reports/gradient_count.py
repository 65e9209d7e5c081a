"""By how many gradients a client's parameters have moved in a round."""

from dataclasses import dataclass
from typing import ClassVar

from clients.optimizers import gradient_count
from clients.parts import LocalRound, Report
from fedsim.errors import UserError
from fedsim.experiment import Experiment
from fedsim.tasks import ANY_TASK


@dataclass(frozen=True)
class GradientCount(Report):
    """gradient_count = a_k of `clients.optimizers.gradient_count`, and learning_rate = eta of the round: with SGD,
    w^t - w_k is eta a_k times a mean of the round's gradients.

    FedNova (Wang et al., NeurIPS 2020), baselines.md A.5. The number of steps itself is in every reply. Momentum is
    `train.momentum`, the proximal mu that of the recipe's terms. Layers that ask for a multiple of the rate count as
    the others. It needs SGD that starts anew each round and keeps its last iterate.
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK

    @property
    def discloses(self) -> str:
        """The number of steps, which is about that of examples."""
        return "the number of local steps"

    def check(self, experiment: Experiment) -> None:
        """UserError where the sum of gradients cannot be read from the parameters' move."""
        train = experiment.train
        if train.optimizer != "sgd":
            raise UserError(f"gradient_count needs train.optimizer = 'sgd', not {train.optimizer!r}")
        if train.momentum and train.persist_optimizer:
            raise UserError("gradient_count needs a fresh momentum each round; set train.persist_optimizer = false")
        if train.local_checks:
            raise UserError("gradient_count needs the last iterate of each round; set train.local_checks = 0")

    def after(self, round: LocalRound) -> dict[str, float]:
        """a_k and eta."""
        count = gradient_count(round.steps, round.train.momentum, round.lr * round.pull)
        return {"gradient_count": count, "learning_rate": round.lr}
