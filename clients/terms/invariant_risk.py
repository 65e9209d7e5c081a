"""IRM's penalty: how far the best scale of the logits in each domain is from the common one."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from clients.parts import Batch, LocalRound
from clients.tools.domains import AnnealedPenalty, by_domain
from fedsim.settings.tuned import Tuned


def scale_gradient(logits: Tensor, labels: Tensor) -> Tensor:
    """d/ds CE(s z, y) at s = 1 of logits z [n, M] and labels y [n], a scalar:

    (1/n) sum_i [sum_k softmax(z_i)_k z_ik - z_i,y_i]
    """
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    mean = (logits.softmax(1) * logits).sum(1)
    return (mean - logits.gather(1, labels[:, None]).squeeze(1)).mean()


@dataclass(frozen=True)
class InvariantRisk(AnnealedPenalty):
    """lam_t (1/E) sum_e g_e g'_e, g_e = d CE(s z, y) / (d s) at s = 1 over the even rows of domain e, g'_e the odd.

    Source: IRMv1 (Arjovsky et al., 2019, arXiv 1907.02893), whose penalty is the squared gradient of the risk with
    respect to a fixed scale s of the logits. The product of two halves is its unbiased estimate (Appendix D), which
    DomainBed takes too; it may be negative. `estimate = "square"` is the squared gradient over all rows of a domain, as
    in the released code for ColoredMNIST. lam_t = 1 in the first `anneal_steps` steps, and lam from then on. At this
    switch the optimizer's moments are cleared, as DomainBed makes Adam anew. The risk is the mean over domains with
    the batches `equal_domains`. A client with one domain adds nothing. `lam = 0` gives FedAvg with these batches.

    FedDG_Benchmark's released code (da58f76) trains IRM as empirical risk minimization: it sets the penalty's weight to
    0 before it is used. Numbers that are printed from that code are not this method's.

    lam: the weight of the penalty
    anneal_steps: the number of the client's steps with weight 1, counted over the run
    estimate: the product of two halves of a domain's rows, or the square over all of them
    """

    lam: Annotated[float, Field(ge=0), Tuned("log:1e-1:1e5", "DomainBed")] = 100.0
    anneal_steps: Annotated[int, Field(ge=0), Tuned("1,10,100,1000,10000", "DomainBed: 10 to the power of U(0, 4)")] = (
        500
    )
    estimate: Literal["unbiased", "square"] = "unbiased"

    def penalty(self, round: LocalRound, batch: Batch) -> Tensor | None:
        """(1/E) sum_e g_e g'_e over the domains with at least two rows; None for fewer than two of them."""
        logits, labels = by_domain(round, batch, batch.logits, 2), by_domain(round, batch, batch.labels, 2)
        penalties = [self.of_domain(*pair) for pair in zip(logits, labels)]
        return torch.stack(penalties).mean() if penalties else None

    def of_domain(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The penalty of one domain, of logits [n, M] and labels [n]."""
        if self.estimate == "square":
            return scale_gradient(logits, labels).square()
        return scale_gradient(logits[0::2], labels[0::2]) * scale_gradient(logits[1::2], labels[1::2])
