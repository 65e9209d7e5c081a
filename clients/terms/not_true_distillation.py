"""FedNTD's client term: what the received model says about the classes that are not the label is kept."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from clients.parts import Batch, LocalRound, StepFunction, Term
from clients.tools.networks import frozen_copy
from fedsim.parts.facts import Fact
from fedsim.settings.effect import Above, Only
from fedsim.settings.tuned import DECADE, Tuned


def not_true_distillation(logits: Tensor, received: Tensor, labels: Tensor, tau: float) -> Tensor:
    """(tau^2 / B) sum_i KL(q_i || p_i), where p and q are softmax(l / tau) over the classes other than the label.

    logits [B, M] are the model's in training (p) and received [B, M] those of the received model (q, a constant);
    labels [B]. With two classes one class is left, and the loss is 0.
    """
    is_label = labels[:, None] == torch.arange(logits.shape[1], device=logits.device)
    log_p, log_q = (
        (each / tau).masked_fill(is_label, -torch.inf).log_softmax(1) for each in (logits, received.detach())
    )
    difference = (log_q - log_p).masked_fill(is_label, 0.0)
    return tau**2 * (log_q.exp() * difference).sum(1).mean()


@dataclass(frozen=True)
class NotTrueDistillation(Term):
    """beta tau^2 KL(q || p), where p and q are softmax(l / tau) over the classes that are not the image's label.

    Source: FedNTD (Lee et al., NeurIPS 2022), equation 6: p of the model in training, q of the received model, which is
    a constant. beta and tau are 1 in the paper's configuration; the class of the released code (Lee-Gihun/FedNTD
    be00ee5) has tau 3 as its own default. The received model is in eval mode. The term costs one more forward pass a
    step. `beta = 0` gives FedAvg. With two classes no class is left to compare, and a run of it equals FedAvg.

    beta: the weight of the term
    tau: the temperature
    """

    side_by_side: ClassVar[bool] = True
    signed_loss: ClassVar[bool] = False
    assumes = (Fact.WHOLE_MODEL, Fact.ROWS, Fact.HARD_LABELS)

    beta: Annotated[float, Field(ge=0), Tuned("log:0.1:10", DECADE)] = 1.0
    tau: Annotated[float, Field(gt=0), Only(beta=Above(0))] = 1.0
    columns: ClassVar[tuple[str, ...]] = ("not_true_loss",)

    def begin(self, round: LocalRound) -> StepFunction | None:
        """Freezes the received model; returns None when beta is 0."""
        if self.beta == 0:
            return None
        received = frozen_copy(round.net)

        def term(batch: Batch) -> Tensor:
            with torch.no_grad(), round.autocast():
                theirs = received(batch.images)
            loss = not_true_distillation(batch.logits.float(), theirs.float(), batch.labels, self.tau)
            round.tally("not_true_loss", loss)
            return self.beta * loss

        return term
