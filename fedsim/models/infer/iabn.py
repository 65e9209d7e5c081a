"""IABN: global statistics, corrected where an image deviates significantly from them."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.common.tasks import ANY_TASK
from fedsim.models.infer.base import Batches, Infer, Predict, Uploads
from fedsim.models.infer.statistics import with_rule
from fedsim.models.net import Net
from fedsim.models.norms.moments import running
from fedsim.parts.facts import Fact
from fedsim.settings.tuned import Tuned


def soft_shrink(x: Tensor, threshold: Tensor) -> Tensor:
    """psi(x; t) = sign(x) max(|x| - t, 0)."""
    return torch.sign(x) * (x.abs() - threshold).clamp_min(0)


def instance_aware(
    mean: Tensor, variance: Tensor, mean_g: Tensor, variance_g: Tensor, positions: int, k: float
) -> tuple[Tensor, Tensor]:
    """(mu, sigma^2) from instance and global statistics, with L positions:

        s_mu = sqrt(var_G / L),  s_var = var_G sqrt(2 / (L - 1))
        mu = mu_G + psi(mu_i - mu_G; k s_mu),  sigma^2 = max(0, var_G + psi(var_i - var_G; k s_var))

    The variance of the instance is unbiased. variance_g includes eps in its spread.
    """
    s_mean, s_variance = torch.sqrt(variance_g / positions), variance_g * math.sqrt(2 / (positions - 1))
    mu = mean_g + soft_shrink(mean - mean_g, k * s_mean)
    return mu, (variance_g + soft_shrink(variance - variance_g, k * s_variance)).clamp_min(0)


@dataclass(frozen=True)
class IABN(Infer):
    """Instance-aware batch norm (NOTE, Gong et al., NeurIPS 2022), used only at inference. The rule is inductive.

    k: the tolerated deviation in standard errors, 4 in NOTE's benchmarks (the default of its class is 3); FedIG-A gives
    no value. A large k gives eval mode, and 0 gives instance norm with unbiased variance
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK

    k: Annotated[float, Field(ge=0), Tuned("2,3,4,8", "ours: around NOTE's 3 and 4")] = 4.0
    assumes = (Fact.BATCH_NORM, Fact.IMAGES)

    def begin(self, net: Net, batches: Batches, uploads: Uploads | None = None) -> Predict:
        """A network that corrects its statistics for each image."""

        def rule(mean: Tensor, variance: Tensor, bn: nn.BatchNorm2d, positions: int) -> tuple[Tensor, Tensor]:
            unbiased = variance * (positions / (positions - 1))
            # eps is on both sides: it is in the spread as in NOTE, cancels in the difference, and remains in the root
            mean_g, variance_g = running(bn)
            mu, var = instance_aware(mean, unbiased + bn.eps, mean_g, variance_g + bn.eps, positions, self.k)
            return mu, torch.sqrt(var.clamp_min(bn.eps))

        return with_rule(net, rule)
