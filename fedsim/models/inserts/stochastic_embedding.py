"""L2D's embedding: the classifier sees draws around a learned mean, with a learned spread."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedsim.common.errors import UserError
from fedsim.models.inserts.base import Insert, attach
from fedsim.models.net import Net
from fedsim.parts.facts import Fact


class EmbeddingLayer(nn.Module):
    """u [B, d] -> e [B, width], with mu = LeakyReLU(Linear(u)) and logvar = ReLU(Linear(u)).

        e = mu + spread exp(logvar / 2) eps, eps ~ N(0, I) (training mode);   e = mu (eval mode)

    eps comes from torch's generator, which is seeded per client and round. e carries mu and logvar (`moments_of`), so
    that a second pass does not overwrite those of the first.
    """

    def __init__(self, d: int, width: int, spread: float) -> None:
        super().__init__()
        self.mean, self.logvar = nn.Linear(d, width), nn.Linear(d, width)
        self.spread = spread

    def forward(self, u: Tensor) -> Tensor:
        """The draw, in float32."""
        mean, logvar = F.leaky_relu(self.mean(u)).float(), F.relu(self.logvar(u)).float()
        noise = self.spread * (logvar / 2).exp() * torch.randn_like(mean) if self.training else 0.0
        e = mean + noise
        attach(e, "moments", (mean, logvar))
        return e


def moments_of(features: Tensor, wanted_by: str) -> tuple[Tensor, Tensor]:
    """(mu, logvar) [B, width] of features that an `EmbeddingLayer` made. Raises UserError for other features."""
    if not hasattr(features, "moments"):
        raise UserError(f"{wanted_by} needs features with a mean and a spread; add the insert 'stochastic_embedding'")
    return features.moments


@dataclass(frozen=True)
class StochasticEmbedding(Insert):
    """An `EmbeddingLayer` after the backbone (or after the bottleneck, which stays), and a classifier of its width.

    Source: L2D (Wang et al., ICCV 2021). Both linear layers are aggregated like all other tensors.

    width: the width of the embedding; 0 takes that of the features (512 on ResNet-18, as in the paper)
    spread: the factor of the noise, 0.2 in the released code; 0 takes e = mu in training too
    """

    width: Annotated[int, Field(ge=0)] = 0
    spread: Annotated[float, Field(ge=0)] = 0.2
    makes_features: ClassVar[bool] = True
    breaks = (Fact.BACKBONE_FEATURES,)
    order: ClassVar[int] = 2

    def apply(self, net: Net) -> None:
        """Adds the layer before the head, and makes a new head."""
        d, classes = net.feature_dim, net.outputs
        layer = EmbeddingLayer(d, self.width or d, self.spread)
        net.bottleneck = layer if isinstance(net.bottleneck, nn.Identity) else nn.Sequential(net.bottleneck, layer)
        net.feature_dim = self.width or d
        net.head = nn.Linear(net.feature_dim, classes)
