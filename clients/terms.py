"""Terms that any step can add to its loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from clients.losses import proximal
from clients.parts import Batch, LocalRound, StepFunction, Term


@dataclass(frozen=True)
class LabelSmoothing(Term):
    """eps * (mean_c(-log p_c) - CE): added to CE it gives cross-entropy with q_c = (1-eps)[c=y] + eps/M.

    FedSB (ICASSP 2025), core.md 1.3; CSAC's stage A with eps = 0.1. The README command of the official code has 0.01,
    its loss class 0.1. `eps=0` gives FedAvg.
    """

    eps: float = 0.01

    def begin(self, round: LocalRound) -> StepFunction | None:
        """None when eps is 0."""
        if self.eps == 0:
            return None

        def term(batch: Batch) -> Tensor:
            uniform = -torch.log_softmax(batch.logits.float(), dim=1).mean()
            return self.eps * (uniform - batch.loss)

        return term


@dataclass(frozen=True)
class Proximal(Term):
    """(mu/2) ||w - w^t||^2 over the trainable parameters, w^t the model received this round.

    FedProx (Li et al., MLSys 2020), baselines.md A.2: the squared norm (several released codes forget the square).
    `mu=0` gives FedAvg bit for bit.
    """

    mu: float = 0.1

    def begin(self, round: LocalRound) -> StepFunction | None:
        """Keeps a copy of w^t for the round; None when mu is 0."""
        if self.mu == 0:
            return None
        parameters = [parameter for parameter in round.net.parameters() if parameter.requires_grad]
        reference = [parameter.detach().clone() for parameter in parameters]
        return lambda batch: proximal(parameters, reference, self.mu)
