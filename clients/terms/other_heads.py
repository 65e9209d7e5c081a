"""COPA's client term: the classifiers of the other clients must be able to classify the features too."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from clients.parts import Batch, LocalRound, StepFunction, Term
from clients.tools.heads import heads_of
from clients.tools.losses import total
from fedsim.parts.facts import Fact
from fedsim.settings.tuned import DECADE, Tuned


@dataclass(frozen=True)
class OtherHeads(Term):
    """weight * sum_{j != k} CE(h_j(f(x)), y), where h_j are the frozen classifiers of the other clients.

    Source: COPA (Wu and Gong, ICCV 2021). Gradients reach the features through h_j; they never change h_j. All heads
    share one forward pass of the extractor. No official code is known; the default weight is that of MarsFL's code.
    `weight = 0` gives FedAvg's loss: a client trains with its own head alone.

    weight: the weight of each other head
    mean: whether the sum is divided by the number of other heads, K - 1
    """

    side_by_side: ClassVar[bool] = True

    weight: Annotated[float, Field(ge=0), Tuned("log:0.1:10", DECADE)] = 1.0
    mean: bool = False
    requires: ClassVar[dict[str, str]] = {"banks": "heads"}
    assumes = (Fact.SEVERAL_CLIENTS,)

    def begin(self, round: LocalRound) -> StepFunction | None:
        """Freezes the others' heads; returns None when there are none, or when the weight is 0."""
        sent = heads_of(round, "other_heads") if self.weight else {}
        heads = [sent[owner] for owner in sorted(sent.keys() - {round.client})]
        if not heads:
            return None
        weight = self.weight / len(heads) if self.mean else self.weight

        def term(batch: Batch) -> Tensor:
            with round.autocast():
                logits = [head(batch.features) for head in heads]
            return weight * total(F.cross_entropy(each.float(), batch.truth) for each in logits)

        return term
