"""gPerXAN's guiding regularizer: the client's features must be classifiable by the frozen global head."""

import copy
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from clients.parts import Batch, LocalRound, StepFunction, Term
from fedsim.tasks import ANY_TASK


@dataclass(frozen=True)
class GuidingHead(Term):
    """weight * CE(h_g(f(x)), y) (of masks: soft Dice loss), h_g the frozen copy of the head received this round.

    gPerXAN (CVPR 2024), eq. of the guiding regularizer; core.md 2.3. Gradients reach the feature extractor through
    h_g, never h_g itself nor the local head; both heads share one forward pass of the extractor. The paper searches
    {0, .25, .5, .75, 1}, the released code has 0.5. `weight=0` gives FedAvg and skips the second head.
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK

    weight: Annotated[float, Field(ge=0)] = 0.5

    def begin(self, round: LocalRound) -> StepFunction | None:
        """Freezes a copy of the head just received; None when the weight is 0."""
        if self.weight == 0:
            return None
        global_head = copy.deepcopy(round.net.head).requires_grad_(False)

        def term(batch: Batch) -> Tensor:
            with round.autocast():
                logits = global_head(batch.features)
            return self.weight * round.task.loss(logits, batch.labels)

        return term
