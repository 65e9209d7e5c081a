"""FedAPT's client term: a query learns to tell the images of the clients apart."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from clients.parts import Batch, LocalRound, StepFunction, Term
from fedsim.models.inserts.keyed_prompts import KeyedPromptHead
from fedsim.parts.facts import Fact


@dataclass(frozen=True)
class QueryLoss(Term):
    """weight * CE(Q f, k) for the images of client k, with the query Q and the keys of the insert `keyed_prompts`.

    Source: FedAPT (Su et al., AAAI 2024). While client k trains, its own key is used in the texts. f [B, e] are the
    features as the head gets them. They take part in the gradient, where something that makes them is trained.

    weight: 1 in the released code; with 0 the query is not trained and the keys of unknown images stay mixed at random
    """

    weight: Annotated[float, Field(ge=0)] = 1.0
    assumes = (Fact.SEVERAL_CLIENTS,)
    belongs_to: ClassVar[str] = "keyed_prompts"
    discloses: ClassVar[str] = "each round a linear classifier whose rows tell the clients' images apart"
    order: ClassVar[int] = -1  # other terms may copy the head when they begin, and the key must be chosen then
    columns: ClassVar[tuple[str, ...]] = ("query_loss",)

    def begin(self, round: LocalRound) -> StepFunction | None:
        """Chooses the client's key; the term, or None when the weight is 0."""
        head, index = _head(round), round.index
        head.key = head.keys[index]
        if self.weight == 0:
            return None

        def term(batch: Batch) -> Tensor:
            with round.autocast():
                scores = head.query(batch.features).float()
            loss = F.cross_entropy(scores, torch.full_like(batch.labels, index))
            round.tally("query_loss", loss)
            return self.weight * loss

        return term

    def end(self, round: LocalRound) -> None:
        """No key is chosen any more."""
        _head(round).key = None


def _head(round: LocalRound) -> KeyedPromptHead:
    assert isinstance(round.net.head, KeyedPromptHead)  # of the insert that the term needs
    return round.net.head
