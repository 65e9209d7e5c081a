"""SelfReg: it draws the features and logits of the images of one class together, without negative pairs."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from clients.parts import Batch, LocalRound, StepFunction, Term
from fedsim.parts.facts import Fact
from fedsim.settings.effect import Above, Only
from fedsim.settings.tuned import DECADE, Tuned


@dataclass(frozen=True)
class SelfReg(Term):
    """weight * c (lam L_ind + (1 - lam) L_hdl), where c = min(CE, 1) has no gradient and lam ~ Beta(alpha, alpha):

        L_ind = MSE(o, o_p1) + feature_weight MSE(z, q(z)_p1)
        L_hdl = MSE(o, lam o_p1 + (1 - lam) o_p2) + feature_weight MSE(z, lam q(z)_p1 + (1 - lam) q(z)_p2)

    Source: SelfReg (Kim et al., ICCV 2021). o are the logits, z the features that the head sees, and q the insert
    `projector`. p1 and p2 are two permutations of the batch within its classes, which are drawn for every batch. Raw
    features are compared with projected ones, as in the released code, and gradients reach both. MSE is a mean over all
    entries. The average of weights (SWA) and the curriculum over pairs of domains are left out, because they belong to
    other parts or need several domains on one client. `weight = 0` gives FedAvg (with a projector that nothing uses).

    alpha: the parameter of the Beta distribution
    feature_weight: the weight of the features besides the logits
    weight: the weight of the whole term; this setting is ours
    """

    side_by_side: ClassVar[bool] = True
    assumes = (Fact.HARD_LABELS,)

    alpha: Annotated[float, Field(gt=0), Only(weight=Above(0))] = 0.5
    feature_weight: Annotated[float, Field(ge=0), Only(weight=Above(0))] = 0.3
    weight: Annotated[float, Field(ge=0), Tuned("log:0.1:10", DECADE)] = 1.0
    requires: ClassVar[dict[str, str]] = {"inserts": "projector"}
    columns: ClassVar[tuple[str, ...]] = ("selfreg_loss",)

    def begin(self, round: LocalRound) -> StepFunction | None:
        """The term, or None when its weight is 0."""
        if self.weight == 0:
            return None
        projector = round.net.get_submodule("projector")
        rng, generator = round.rng("self-reg"), round.generator("self-reg")

        def draw(batch: Batch) -> tuple[tuple[Tensor, ...], float]:
            return class_permutations(batch.labels, generator), float(rng.beta(self.alpha, self.alpha))

        def term(batch: Batch) -> Tensor:
            (order, *partners), lam = batch.once(self, lambda: draw(batch))
            with round.autocast():
                projected = projector(batch.features)
            logits = regulariser(batch.logits.float()[order], batch.logits.float()[order], partners, lam)
            features = regulariser(batch.features.float()[order], projected.float()[order], partners, lam)
            scale = batch.loss.detach().clamp(max=1.0)
            loss = scale * (logits + self.feature_weight * features)
            round.tally("selfreg_loss", loss)
            return self.weight * loss

        return term


def class_permutations(labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """An order of the batch by class, and two independent permutations of the ordered batch within its classes."""
    order = labels.argsort(stable=True)
    ranked = labels[order].double()
    draws = torch.rand(2, len(labels), generator=generator, dtype=torch.float64).to(labels.device, non_blocking=True)
    return order, (ranked + draws[0]).argsort(), (ranked + draws[1]).argsort()


def regulariser(own: Tensor, other: Tensor, partners: list[Tensor], lam: float) -> Tensor:
    """lam MSE(own, other_p1) + (1 - lam) MSE(own, lam other_p1 + (1 - lam) other_p2), for rows [B, D]."""
    first, second = (other[partner] for partner in partners)
    individual = F.mse_loss(own, first)
    mixed = F.mse_loss(own, lam * first + (1 - lam) * second)
    return lam * individual + (1 - lam) * mixed
