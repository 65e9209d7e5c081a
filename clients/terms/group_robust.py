"""GroupDRO's loss: the domains with a high risk count more, and this weight grows over the run."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.parts import Batch, LocalRound, StepFunction
from clients.tools.domains import DomainTerm, risks, several_domains
from fedsim.settings.tuned import Tuned

ENTRY = "group-weights"  # the store's entry


@dataclass(frozen=True)
class GroupRobust(DomainTerm):
    """sum_e q_e R_e in place of the mean loss: q_e <- q_e exp(eta R_e) in every step, divided by their sum.

    Source: GroupDRO (Sagawa et al., ICLR 2020), the groups being domains, as in DomainBed. R_e is the loss on domain e
    in the batch. The term adds sum_e q_e R_e minus the batch's loss. q begins with equal weights, and the client keeps
    it over the rounds. A domain that is absent from a batch keeps its weight before the division. q has no gradient. A
    client with one domain adds nothing. `eta = 0` gives FedAvg, with the batches `equal_domains`.

    eta: the step size of the logarithms of q
    """

    signed_loss: ClassVar[bool] = False

    eta: Annotated[float, Field(ge=0), Tuned("log:1e-3:1e-1", "DomainBed")] = 0.01

    def begin(self, round: LocalRound) -> StepFunction | None:
        """The difference between the weighted and the plain loss, or None when the client has one domain."""
        if self.eta == 0 or not several_domains(round):
            return None
        weights = round.scratch[ENTRY] = self._weights(round)

        def raised(risks: dict[int, Tensor]) -> Tensor:
            for domain, risk in risks.items():
                weights[domain] *= (self.eta * risk.detach()).exp()
            return weights.div_(weights.sum()).clone()

        def term(batch: Batch) -> Tensor:
            of_domains = risks(round, batch)
            if not of_domains:
                return batch.logits.new_zeros(())
            q = batch.once(ENTRY, lambda: raised(of_domains))
            robust = torch.stack([q[domain] * risk for domain, risk in of_domains.items()]).sum()
            return robust - batch.loss

        return term

    def end(self, round: LocalRound) -> None:
        """Stores q for the next round."""
        if ENTRY in round.scratch:
            round.store.put(ENTRY, {"q": round.scratch[ENTRY]})

    def _weights(self, round: LocalRound) -> Tensor:
        """q by the number of the domain, which is 0 for a domain of which the client has no training example."""
        if stored := round.store.get(ENTRY):
            return stored["q"].to(round.device, copy=True)
        present = torch.from_numpy(np.bincount(round.data.domains) > 0).float()
        return (present / present.sum()).to(round.device)
