"""How large the received model's loss is on a client's training examples."""

from dataclasses import dataclass
from typing import ClassVar

from clients.parts import LocalRound, Report
from fedsim.tasks import ANY_TASK

EVALUATION_BATCH = 256


@dataclass(frozen=True)
class ReceivedLoss(Report):
    """received_loss = F_k(theta): mean cross-entropy of the received model, in eval mode, on all training examples
    without augmentation. It costs one forward pass over them in every round.

    AFL (Mohri et al., ICML 2019); baselines.md E.2, step 3. MarsFL measures the trained model on the client's test
    data, which is another quantity and is not offered.
    """

    whole: ClassVar[bool] = True
    tasks: ClassVar[tuple[str, ...]] = ANY_TASK

    @property
    def discloses(self) -> str:
        """One number a round."""
        return "each round the global model's mean loss on the client's training data"

    def before(self, round: LocalRound) -> dict[str, float]:
        """The loss of the network as received."""
        round.net.eval()
        _, loss, _ = round.task.measure(
            round.net, round.data.evaluation(round.data.training_positions(), EVALUATION_BATCH)
        )
        return {"received_loss": loss}
