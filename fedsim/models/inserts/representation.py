"""A representation between the backbone and the classifier, deterministic or drawn from a Gaussian."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedsim.common.errors import UserError
from fedsim.models.inserts.base import Insert, attach
from fedsim.models.net import Net
from fedsim.parts.facts import Fact, Facts

LEAST_STD = 1e-6


class Gaussian(nn.Module):
    """[B, 2 d] -> z [B, d]: mu is the first half, and sigma = softplus(second half) + 1e-6.

        z = mu + sigma eps, eps ~ N(0, I), one draw per input (training mode);   z = mu (eval mode)

    eps comes from torch's generator, which is seeded per client and round. z carries mu and sigma (`gaussian_of`). If
    the module kept them itself it could not be copied, and a second pass would overwrite those of the first.
    """

    def forward(self, x: Tensor) -> Tensor:
        """The draw, in float32."""
        mean, raw = x.float().chunk(2, dim=1)
        std = F.softplus(raw) + LEAST_STD
        z = mean + std * torch.randn_like(mean) if self.training else mean.clone()
        attach(z, "gaussian", (mean, std))
        return z


def gaussian_of(features: Tensor, wanted_by: str) -> tuple[Tensor, Tensor]:
    """(mu, sigma) [B, d] of features that a `Gaussian` drew. Raises UserError for other features."""
    if not hasattr(features, "gaussian"):
        raise UserError(f"{wanted_by} needs features that are drawn; add the insert 'representation' (stochastic)")
    return features.gaussian


@dataclass(frozen=True)
class Representation(Insert):
    """Linear(d, 2 width) after the backbone: mean and spread of a Gaussian, and z drawn from it is classified.

    Source: FedSR (Nguyen et al., NeurIPS 2022), FedCMI. With `stochastic = False` it is Linear(d, width) and z is its
    output (FedL2R). There is no ReLU after it, so that z may have either sign. A bottleneck of the network remains
    before it. In training one z is drawn per image; in eval mode z is the mean (see the inference rule
    `sampled_representation`). The second half adds d width + width weights to what is sent.

    width: d_z; 0 takes the width of the backbone's features, which is 512 on ResNet-18 and 2048 on ResNet-50, as in the
    papers
    stochastic: whether z is drawn, or is the output of the layer
    """

    width: Annotated[int, Field(ge=0)] = 0
    stochastic: bool = True
    makes_features: ClassVar[bool] = True
    breaks = (Fact.BACKBONE_FEATURES,)
    order: ClassVar[int] = 2

    @property
    def provides(self) -> Facts:
        """Means and spreads of which features are drawn."""
        return (Fact.DRAWN_FEATURES,) if self.stochastic else ()

    def apply(self, net: Net) -> None:
        """Adds the layer after the bottleneck (or in its place) and makes a new classifier of its width."""
        d, classes = net.feature_dim, net.outputs
        width = self.width or d
        layers = [] if isinstance(net.bottleneck, nn.Identity) else [net.bottleneck]
        layers += [nn.Linear(d, 2 * width), Gaussian()] if self.stochastic else [nn.Linear(d, width)]
        net.bottleneck = nn.Sequential(*layers)
        net.feature_dim = width
        net.head = nn.Linear(width, classes)
