"""The number of gradients by which a client's parameters have moved in a round."""

from dataclasses import dataclass
from typing import ClassVar

from clients.optimizers import gradient_count, require_fresh_sgd
from clients.parts import LocalRound, Report
from fedsim.common.tasks import ANY_TASK
from fedsim.settings.experiment import Experiment


@dataclass(frozen=True)
class GradientCount(Report):
    """gradient_count = a_k of `clients.optimizers.gradient_count`, and learning_rate = eta of the round.

    With SGD, w^t - w_k is eta a_k times a mean of the round's gradients.

    Source: FedNova (Wang et al., NeurIPS 2020). Every reply has the number of steps already. The momentum is
    `train.momentum`, and the proximal mu is that of the recipe's terms, times the alpha of `client_momentum` where it
    multiplies gradients. Layers that ask for a multiple of the learning rate count like the others. Steps count up to
    the model that is sent (`train.local_checks`). The report needs SGD that starts anew each round.
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK
    discloses: ClassVar[str] = "the number of local steps"
    columns: ClassVar[tuple[str, ...]] = ("gradient_count", "learning_rate")

    def check(self, experiment: Experiment) -> None:
        """Raises UserError where the sum of the gradients cannot be computed from the move of the parameters."""
        require_fresh_sgd("gradient_count", experiment.train)

    def after(self, round: LocalRound) -> dict[str, float]:
        """a_k and eta."""
        count = gradient_count(round.sent_steps, round.train.momentum, round.lr * round.pull)
        return {"gradient_count": count, "learning_rate": round.lr}
