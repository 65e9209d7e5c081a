"""The loss of the received model on a client's training examples."""

from dataclasses import dataclass
from typing import ClassVar

from clients.parts import LocalRound, Report
from fedsim.common.tasks import ANY_TASK
from fedsim.models.tasks import EVALUATION_BATCH
from fedsim.parts.facts import Fact


@dataclass(frozen=True)
class ReceivedLoss(Report):
    """received_loss = F_k(theta): the mean cross-entropy of the received model on all training examples.

    The model is in eval mode, and the examples have no augmentation. This costs one forward pass over them in every
    round.

    Source: AFL (Mohri et al., ICML 2019). MarsFL measures the trained model on the client's test data, which is another
    quantity and is not offered.
    """

    assumes = (Fact.WHOLE_MODEL,)
    tasks: ClassVar[tuple[str, ...]] = ANY_TASK
    discloses: ClassVar[str] = "each round the global model's mean loss on the client's training data"
    columns: ClassVar[tuple[str, ...]] = ("received_loss",)

    def before(self, round: LocalRound) -> dict[str, float]:
        """The loss of the network as it was received."""
        net, data = round.net.eval(), round.data
        _, loss, _ = round.task.measure(net, data.evaluation(data.training_positions(), EVALUATION_BATCH))
        return {"received_loss": loss}
