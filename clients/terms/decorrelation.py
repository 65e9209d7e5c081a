"""FedDecorr's client term: the dimensions of the features are decorrelated, so that they do not collapse."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from clients.parts import Batch, LocalRound, StepFunction, Term
from fedsim.settings.tuned import DECADE, Tuned


def decorrelation(features: Tensor, form: str = "paper", eps: float = 1e-8) -> Tensor:
    """||K / N||_F^2 / d^2 ("paper"), or mean_{i != j} K_ij^2 / N ("released"), a scalar; K = Z^T Z [d, d].

    Z [N, d] are the features [N, d] with mean 0 and spread 1: z = (h - mean) / sqrt(eps + unbiased variance), over the
    N rows of the batch. One row gives 0.
    """
    if len(features) < 2:
        return 0.0 * features.sum()
    variance, mean = torch.var_mean(features, dim=0)
    scores = (features - mean) / torch.sqrt(eps + variance)
    products, count = scores.T @ scores, len(scores)
    width = len(products)
    if form == "paper":
        return (products / count).square().sum() / width**2
    apart = products.square().sum() - products.diagonal().square().sum()
    return apart / max(width * (width - 1), 1) / count


@dataclass(frozen=True)
class Decorrelation(Term):
    """beta ||K / N||_F^2 / d^2, with K = Z^T Z [d, d] of the batch's features, each dimension with mean 0 and spread 1.

    Source: FedDecorr (Shi et al., ICLR 2023), equation 8; beta 0.1. N is the number of rows of the batch and d the
    number of features, which are the input of the head. The diagonal of K / N is (N - 1) / N for every dimension that
    varies, so that it has hardly any gradient. The released code (bytedance/FedDecorr 973e4af) leaves it out, takes the
    mean of K_ij^2 over the other pairs and divides by N once: its gradient is N d / (d - 1) times as large. A batch of
    one image adds 0. `beta = 0` gives FedAvg.

    beta: the weight of the term
    form: `paper` as above, or `released`
    eps: is added to the variance before the root
    """

    side_by_side: ClassVar[bool] = True
    signed_loss: ClassVar[bool] = False

    beta: Annotated[float, Field(ge=0), Tuned("log:0.01:1", DECADE)] = 0.1
    form: Literal["paper", "released"] = "paper"
    eps: Annotated[float, Field(gt=0)] = 1e-8
    columns: ClassVar[tuple[str, ...]] = ("decorrelation_loss",)

    def begin(self, round: LocalRound) -> StepFunction | None:
        """The term, or None when beta is 0."""
        if self.beta == 0:
            return None

        def term(batch: Batch) -> Tensor:
            loss = decorrelation(batch.features.float(), self.form, self.eps)
            round.tally("decorrelation_loss", loss)
            return self.beta * loss

        return term
