"""CLIP's own loss inside a batch: every image against the texts of all images of the batch, and the other way round."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from clients.parts import Batch, LocalRound, StepFunction, Term
from fedsim.parts.facts import Fact


def in_batch_contrast(logits: Tensor, labels: Tensor) -> Tensor:
    """(1/2) [mean_i -log softmax_j(l_ij)_i + mean_j -log softmax_i(l_ij)_j] with l_ij = logits[i, y_j], the logit of
    image i for the class of image j; logits [B, M], labels [B]."""
    pairs, diagonal = logits[:, labels], torch.arange(len(labels), device=logits.device)
    return (F.cross_entropy(pairs, diagonal) + F.cross_entropy(pairs.T, diagonal)) / 2


@dataclass(frozen=True)
class InBatchContrast(Term):
    """share * (in_batch_contrast - CE). Added to CE, share = 1 gives the contrast in place of the cross-entropy.

    Source: CLIP (Radford et al., ICML 2021), and the released trainer of FedCLIP (Lu et al., IEEE Data Engineering
    Bulletin 2023). Images of one class in a batch are each other's negatives, because each image has a text of its own
    as its target. Meant for `model.head = "text"`. `share = 0` gives FedAvg.

    share: how much of the cross-entropy the contrast replaces
    """

    share: Annotated[float, Field(ge=0, le=1)] = 1.0
    assumes = (Fact.HARD_LABELS,)
    columns: ClassVar[tuple[str, ...]] = ("contrast_loss",)

    def begin(self, round: LocalRound) -> StepFunction | None:
        """The term, or None when the share is 0."""
        if self.share == 0:
            return None

        def term(batch: Batch) -> Tensor:
            contrast = in_batch_contrast(batch.logits.float(), batch.labels)
            round.tally("contrast_loss", contrast)
            return self.share * (contrast - batch.loss)

        return term
