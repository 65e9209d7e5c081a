"""gPerXAN's guiding regularizer: the frozen global head must be able to classify the client's features."""

import copy
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from clients.parts import Batch, LocalRound, StepFunction, Term
from fedsim.common.tasks import ANY_TASK
from fedsim.parts.facts import Fact
from fedsim.settings.tuned import Tuned


@dataclass(frozen=True)
class GuidingHead(Term):
    """weight * CE(h_g(f(x)), y), where h_g is a frozen copy of the head received this round.

    On masks the soft Dice loss takes the place of the cross-entropy.

    Source: gPerXAN (CVPR 2024), the guiding regularizer. Gradients reach the feature extractor through h_g; they change
    neither h_g nor the local head. Both heads share one forward pass of the extractor. The paper searches {0, 0.25,
    0.5, 0.75, 1}, and the released code has 0.5. `weight = 0` gives FedAvg and skips the second head.

    weight: lambda
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK
    side_by_side: ClassVar[bool] = True
    signed_loss: ClassVar[bool] = False
    assumes = (Fact.GLOBAL_HEAD,)

    weight: Annotated[float, Field(ge=0), Tuned("0,0.25,0.5,0.75,1", "the paper's grid")] = 0.5

    def begin(self, round: LocalRound) -> StepFunction | None:
        """Freezes a copy of the received head; returns None when the weight is 0."""
        if self.weight == 0:
            return None
        global_head = copy.deepcopy(round.net.head).requires_grad_(False)

        def term(batch: Batch) -> Tensor:
            with round.autocast():
                logits = global_head(batch.features)
            return self.weight * round.task.loss(logits, batch.truth)

        return term
