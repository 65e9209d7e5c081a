"""COPA's client: the features must suit the other clients' classifiers too."""

import copy
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from clients.parts import Batch, LocalRound, StepFunction, Term


@dataclass(frozen=True)
class OtherHeads(Term):
    """weight * sum_{j != k} CE(h_j(f(x)), y), h_j the classifiers of the other clients, frozen.

    COPA (Wu and Gong, ICCV 2021); baselines.md B.9. Gradients flow through h_j into the features, never into h_j. All
    heads share one forward pass of the extractor. No official code is known; the weight is that of MarsFL's.
    `weight = 0` leaves a client with its own head alone.

    weight: of each other head. mean: divide by their number, K - 1.
    """

    weight: Annotated[float, Field(ge=0)] = 1.0
    mean: bool = False
    requires: ClassVar[dict[str, str]] = {"banks": "heads"}
    needs_clients: ClassVar[bool] = True

    def begin(self, round: LocalRound) -> StepFunction | None:
        """Freezes the others' heads; None when there are none, or when the weight is 0."""
        heads = self._others(round) if self.weight else []
        if not heads:
            return None
        weight = self.weight / len(heads) if self.mean else self.weight

        def term(batch: Batch) -> Tensor:
            with round.autocast():
                logits = [head(batch.features) for head in heads]
            return weight * sum(F.cross_entropy(each.float(), batch.labels) for each in logits)

        return term

    def _others(self, round: LocalRound) -> list[nn.Module]:
        """h_j of the other clients, in domain order."""
        states: dict[str, dict[str, Tensor]] = {}
        for key, tensor in round.tensors("heads", "other_heads").items():
            owner, _, name = key.rpartition(":")
            states.setdefault(owner, {})[name.removeprefix("head.")] = tensor
        heads = []
        for owner in sorted(states.keys() - {round.client}):
            head = copy.deepcopy(round.net.head)
            head.load_state_dict(states[owner])
            heads.append(head.requires_grad_(False))
        return heads
