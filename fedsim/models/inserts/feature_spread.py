"""FedFA: styles of feature maps are drawn more widely where the clients' styles differ more."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.common.tasks import ANY_TASK
from fedsim.models.inserts.base import Insert, channels_at
from fedsim.models.inserts.dsu import RedrawnStyles, map_moments, places, spread_of
from fedsim.models.net import Net
from fedsim.parts.facts import Fact

FRESH = 0.01  # the share of a batch in the running statistics
STATISTICS = ("mean", "std")


def widening(spread: Tensor, eps: float = 1e-6) -> Tensor:
    """gamma_c = C g_c / sum_j g_j with g = 1 / (1 + 1 / (V + eps)), whose mean over the channels is 1; V [C]."""
    share = 1 / (1 + 1 / (spread + eps))
    return len(share) * share / share.sum()


class WidenedStyles(RedrawnStyles):
    """Styles drawn as by DSU, with a variance that is 1 + gamma_c times as large, which the clients' spread decides.

    gamma_c = C g_c / sum_j g_j,  g = 1 / (1 + 1 / (V + eps)),  V [C]: the variance over clients of their mean style

    The buffers `running_mean` and `running_std` [C] follow the batches' mean of mu and sigma, and `spread_mean` and
    `spread_std` [C] are V of both. They are a part of the model: the first two are averaged as running statistics are,
    and the server replaces the other two.
    """

    def __init__(self, p: float, eps: float, channels: int) -> None:
        super().__init__(p, eps)
        self.register_buffer("running_mean", torch.zeros(channels))
        for name in ("running_std", "spread_mean", "spread_std"):
            self.register_buffer(name, torch.ones(channels))

    def spreads(self, x: Tensor) -> Sequence[Tensor]:
        """(S_mu, S_sigma) [C] each, of noise; it also lets the running statistics follow this batch."""
        spreads = []
        for name, statistic in zip(STATISTICS, map_moments(x, self.eps), strict=True):
            running = self.get_buffer(f"running_{name}")
            running.lerp_(statistic.detach().mean(dim=0).to(running.dtype), FRESH)
            gamma = widening(self.get_buffer(f"spread_{name}"), self.eps)
            spreads.append(torch.sqrt(1 + gamma).to(x.dtype) * spread_of(statistic, self.eps))
        return spreads


@dataclass(frozen=True)
class FeatureSpread(Insert):
    """y = (x - mu) / sigma (sigma + e_2 S_sigma) + mu + e_1 S_mu,  S^2 = (1 + gamma_c) (v + eps).

    gamma_c = C g_c / sum_j g_j,  g = 1 / (1 + 1 / (V + eps)),  V_c: the variance over clients of their mean style in
    channel c (part `client_spread`), 1 before the first. v is the variance over the batch. All else is as in DSU.

    Source: FedFA (Zhou and Konukoglu, ICLR 2023), from the released code (tfzhou/FedFA 57e9582). Each layer follows the
    mean style of its batches (0.99 of before and 0.01 of the batch, in calls that draw), as buffers of the model. They
    are averaged with it, so that each round goes on from the clients' mean. The paper's layers are after each block of
    AlexNet and each encoder block of a U-Net; here they are after the stages of any backbone that has some. `p = 0`
    gives FedAvg with four unused buffers in a layer. With V equal in all channels it is DSU with twice the variance.

    p: the probability of drawing per call, for the whole batch
    eps: is added to variances
    stages: the stages after which layers act; stages that a backbone lacks are left out
    """

    assumes = (Fact.IMAGES,)
    tasks: ClassVar[tuple[str, ...]] = ANY_TASK
    order: ClassVar[int] = 0
    side_by_side: ClassVar[bool] = False  # a draw decides for a whole batch
    requires: ClassVar[dict[str, str]] = {"refine": "client_spread"}
    discloses: ClassVar[str] = (
        "as buffers of the model, the mean over a client's images of the means and deviations of feature channels "
        "(2 C numbers a layer)"
    )

    p: Annotated[float, Field(ge=0, le=1)] = 0.5
    eps: Annotated[float, Field(gt=0)] = 1e-6
    stages: tuple[int, ...] = (1, 2, 3, 4)

    def apply(self, net: Net) -> None:
        """Adds the layers as hooks, with their buffers. UserError when the backbone has none of the stages."""
        paths = places(net, self.stages, False, "FeatureSpread")
        layers = [WidenedStyles(self.p, self.eps, channels_at(net, path)) for path in paths]
        net.feature_spread = nn.ModuleList(layers)
        for path, layer in zip(paths, layers, strict=True):
            net.get_submodule(path).register_forward_hook(layer.after)
