"""PLAN's client term: local prompts with a teacher in one round, their aggregators in the next."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from clients.parts import Batch, LocalRound, StepFunction, Term
from fedsim.models.inserts.prompt_sets import PromptSetsHead, PromptsOfClients
from fedsim.parts.facts import Fact


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(p || q) = sum_c p_c (log p_c - log q_c), the mean over the batch, of logits [B, M] of p and of q."""
    p, q = teacher.log_softmax(dim=1), student.log_softmax(dim=1)
    return (p.exp() * (p - q)).sum(dim=1).mean()


@dataclass(frozen=True)
class PromptStages(Term):
    """c KL(teacher || own prompts) in the rounds 1, 3, 5, ..., in which client k trains its own prompts; nothing in the
    others, in which it trains the aggregators of the insert `prompt_sets`.

    Source: PLAN (Gong et al. 2024, arXiv 2411.10063). The teacher of round 1 is zero-shot CLIP (the texts of
    model.prompt, no prompts). Later it has the received aggregated prompts. No gradient reaches it (in the released
    code it does). It costs a further forward pass of the image encoder. The direction of KL is ours.

    c: the weight of the teacher, 1 in the released code; with 0 there is none
    """

    c: Annotated[float, Field(ge=0)] = 1.0
    assumes = (Fact.SEVERAL_CLIENTS, Fact.BACKBONE_FEATURES)
    belongs_to: ClassVar[str] = "prompt_sets"
    discloses: ClassVar[str] = "every client's own prompts, each round, to the server and to all clients"
    order: ClassVar[int] = -1  # other terms may copy the network when they begin, and the stage must be chosen then
    columns: ClassVar[tuple[str, ...]] = ("teacher_loss",)

    def begin(self, round: LocalRound) -> StepFunction | None:
        """Chooses what is trained; the term, or None without a teacher."""
        local, sets = round.round % 2 == 1, _sets(round)
        sets.client = round.index if local else None
        sets.learn(prompts=local or sets.through, aggregators=not local)
        if not local or self.c == 0:
            return None
        teacher = self._teacher(round)

        def term(batch: Batch) -> Tensor:
            loss = divergence(teacher(batch.images), batch.logits.float())
            round.tally("teacher_loss", loss)
            return self.c * loss

        return term

    @torch.no_grad()
    def _teacher(self, round: LocalRound) -> Callable[[Tensor], Tensor]:
        """A function from images to the teacher's logits, in float32. Its texts are computed once."""
        net, sets, head = round.net, _sets(round), round.net.head
        assert isinstance(head, PromptSetsHead)
        with round.autocast():
            vision = sets.aggregated("vision") if round.round > 1 else None
            texts = head.read_with(sets.aggregated("text")) if round.round > 1 else head.zero_shot

        @torch.no_grad()
        def logits(images: Tensor) -> Tensor:
            with sets.holding("vision", vision), round.autocast():
                return head.logits(net.features(images), texts).float()

        return logits

    def end(self, round: LocalRound) -> None:
        """No client and no stage is chosen any more."""
        sets = _sets(round)
        sets.client = None
        sets.learn(prompts=True, aggregators=True)


def _sets(round: LocalRound) -> PromptsOfClients:
    sets = round.net.prompts
    assert isinstance(sets, PromptsOfClients)  # of the insert that the term needs
    return sets
