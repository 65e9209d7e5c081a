"""Smoothed labels as a term of the local loss."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from clients.parts import Batch, LocalRound, StepFunction, Term
from fedsim.settings.tuned import Tuned


@dataclass(frozen=True)
class LabelSmoothing(Term):
    """eps * (mean_c(-log p_c) - CE). Added to CE it gives the cross-entropy with q_c = (1 - eps)[c = y] + eps / M.

    Source: FedSB (ICASSP 2025); with eps = 0.1 also stage A of CSAC. The command in the README of FedSB's official code
    has 0.01, and its loss class 0.1. `eps = 0` gives FedAvg.

    eps: the share of the uniform distribution in q
    """

    in_prelude: ClassVar[bool] = True
    side_by_side: ClassVar[bool] = True

    eps: Annotated[float, Field(ge=0, le=1), Tuned("0.01,0.05,0.1,0.2", "ours: from the released code's value on")] = (
        0.01
    )

    def begin(self, round: LocalRound) -> StepFunction | None:
        """The term, or None when eps is 0."""
        if self.eps == 0:
            return None

        def term(batch: Batch) -> Tensor:
            uniform = -torch.log_softmax(batch.logits.float(), dim=1).mean()
            return self.eps * (uniform - batch.loss)

        return term
