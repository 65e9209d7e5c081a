"""V-REx's penalty: the variance of the domains' risks."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from clients.parts import Batch, LocalRound
from clients.tools.domains import AnnealedPenalty, risks
from fedsim.settings.tuned import Tuned


@dataclass(frozen=True)
class RiskExtrapolation(AnnealedPenalty):
    """lam_t (1/E) sum_e (R_e - R)^2, where R_e is the loss on domain e in the batch and R the mean of them.

    Source: V-REx (Krueger et al., ICML 2021), in DomainBed's form. The paper adds beta times the variance to the sum of
    the risks, so that its beta is E lam. lam_t = 1 in the first `anneal_steps` steps, and lam from then on. At this
    switch the optimizer's moments are cleared, as DomainBed makes Adam anew. The risk is the mean over domains with the
    batches `equal_domains`. A client with one domain adds nothing. `lam = 0` gives FedAvg with these batches.

    FedDG_Benchmark's released code (da58f76) trains V-REx as empirical risk minimization, because it inherits IRM's
    step, in which the penalty's weight is set to 0. Its penalty would be a variance within one group.

    lam: the weight of the variance
    anneal_steps: the number of the client's steps with weight 1, counted over the run
    """

    signed_loss: ClassVar[bool] = False

    lam: Annotated[float, Field(ge=0), Tuned("log:1e-1:1e5", "DomainBed")] = 10.0
    anneal_steps: Annotated[int, Field(ge=0), Tuned("1,10,100,1000,10000", "DomainBed: 10 to the power of U(0, 4)")] = (
        500
    )

    def penalty(self, round: LocalRound, batch: Batch) -> Tensor | None:
        """The population variance of the risks; None for fewer than two domains."""
        of_domains = list(risks(round, batch).values())
        return torch.stack(of_domains).var(correction=0) if of_domains else None
