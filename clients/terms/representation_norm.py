"""The L2 penalty on the representation (FedSR, FedL2R)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from clients.parts import Batch, LocalRound, StepFunction, Term
from fedsim.settings.tuned import Tuned


def l2r(z: Tensor, kind: str = "squared") -> Tensor:
    """(1/B) sum_i ||z_i||^2 ("squared") or (1/B) sum_i ||z_i|| ("norm"), z [B, d]. A zero row has the gradient 0."""
    z = z.float()
    return z.square().sum(dim=1).mean() if kind == "squared" else torch.linalg.vector_norm(z, dim=1).mean()


@dataclass(frozen=True)
class RepresentationNorm(Term):
    """alpha_l2r L2R, where L2R = (1/B) sum_i ||z_i||^2 and z are the features that the classifier sees.

    Of a stochastic representation, z is the drawn value.

    Source: FedSR (Nguyen et al., NeurIPS 2022), FedL2R. The term aligns the marginal p(z)
    of all clients with a Gaussian around zero: E||z||^2 = 2 s^2 H(p, N(0, s^2 I)) - d s^2
    log(2 pi s^2). The paper squares the norm and the official code does not, so the weight
    of one cannot be used for the other. `alpha_l2r = 0` gives FedAvg on the same network.

    alpha_l2r: the weight of the term, 0.01 in the official PACS run; FedDG_Benchmark tries 0.001, 0.01, 0.1
    l2r: "squared" (paper) or "norm" (official code)
    """

    side_by_side: ClassVar[bool] = True

    alpha_l2r: Annotated[float, Field(ge=0), Tuned("1e-3,1e-2,1e-1", "FedDG_Benchmark")] = 0.01
    l2r: Literal["squared", "norm"] = "squared"
    columns: ClassVar[tuple[str, ...]] = ("l2r_loss",)

    def begin(self, round: LocalRound) -> StepFunction | None:
        """The term, or None when alpha_l2r is 0."""
        if self.alpha_l2r == 0:
            return None

        def term(batch: Batch) -> Tensor:
            loss = l2r(batch.features, self.l2r)
            round.tally("l2r_loss", loss)
            return self.alpha_l2r * loss

        return term
