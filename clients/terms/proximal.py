"""FedProx's client term: it keeps the trained model near the received one."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from clients.parts import LocalRound, StepFunction, Term
from clients.tools.losses import proximal
from fedsim.common.tasks import ANY_TASK
from fedsim.settings.tuned import Tuned


@dataclass(frozen=True)
class Proximal(Term):
    """(mu/2) ||w - w^t||^2 over the trainable parameters, where w^t is the model received this round.

    Source: FedProx (Li et al., MLSys 2020). The norm is squared as in the paper; several released codes forget the
    square. `mu = 0` gives FedAvg bit for bit.

    mu: the weight of the distance
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK
    side_by_side: ClassVar[bool] = True
    signed_loss: ClassVar[bool] = False

    mu: Annotated[float, Field(ge=0), Tuned("0.001,0.01,0.1", "FedDG_Benchmark")] = 0.1

    @property
    def pull(self) -> float:
        """mu, because the gradient of the term is mu (w - w^t)."""
        return self.mu

    def begin(self, round: LocalRound) -> StepFunction | None:
        """Keeps a copy of w^t for the round and returns the term, or None when mu is 0."""
        if self.mu == 0:
            return None
        parameters = [parameter for parameter in round.net.parameters() if parameter.requires_grad]
        reference = [parameter.detach().clone() for parameter in parameters]
        return lambda batch: proximal(parameters, reference, self.mu)
