"""DSU: styles of feature maps are drawn from Gaussians around them, as wide as the batch's styles are spread."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.common.errors import UserError
from fedsim.common.tasks import ANY_TASK
from fedsim.models.inserts.base import Insert
from fedsim.models.net import Net
from fedsim.parts.facts import Fact
from fedsim.settings.tuned import Tuned

STEM = ("conv1", "maxpool")  # of torchvision's ResNets


def spread_of(values: Tensor, eps: float) -> Tensor:
    """sqrt(variance over the batch + eps), the unbiased one, of statistics [B, C]; [C]."""
    return torch.sqrt(values.var(dim=0) + eps)


def redrawn(x: Tensor, noise: Tensor, spreads: Sequence[Tensor], eps: float) -> Tensor:
    """(x - mu) / sigma (sigma + e2 S_sigma) + mu + e1 S_mu of maps x [B, C, H, W], noise (e1, e2) [2, B, C].

    mu and sigma = sqrt(unbiased variance + eps) are of each image and channel; spreads (S_mu, S_sigma) [C] each.
    """
    mean, std = map_moments(x, eps)
    drawn = [
        (own + draw * spread)[:, :, None, None] for own, draw, spread in zip((mean, std), noise, spreads, strict=True)
    ]
    return (x - mean[:, :, None, None]) / std[:, :, None, None] * drawn[1] + drawn[0]


def map_moments(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(mean, sqrt(unbiased variance + eps)) of each image and channel of x [B, C, H, W], [B, C] each."""
    variance, mean = torch.var_mean(x, dim=(2, 3))
    return mean, torch.sqrt(variance + eps)


class RedrawnStyles(nn.Module):
    """Draws new styles for a training batch with probability p per call; the identity in eval mode and for one sample.

    y = (x - mu) / sigma (sigma + e_2 S_sigma) + mu + e_1 S_mu, where e_1, e_2 ~ N(0, 1) for each image and channel
    """

    def __init__(self, p: float, eps: float) -> None:
        super().__init__()
        self.p, self.eps = p, eps

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] to the same shape. Draws come from torch's generator, which is seeded per client and round."""
        if not self.training or float(torch.rand(())) >= self.p or len(x) < 2 or x.shape[2] * x.shape[3] < 2:
            return x
        # In bfloat16 the rounding of the mean of a nearly constant map is divided by its tiny deviation.
        full = x if x.dtype == torch.float64 else x.float()
        noise = torch.randn(2, *x.shape[:2]).to(full.device, full.dtype, non_blocking=True)
        return redrawn(full, noise, self.spreads(full), self.eps).to(x.dtype)

    def spreads(self, x: Tensor) -> Sequence[Tensor]:
        """(S_mu, S_sigma): sqrt(variance over the batch + eps) of the means and of the deviations, [C] each."""
        return [spread_of(statistic, self.eps) for statistic in map_moments(x, self.eps)]

    def after(self, module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        """A forward hook of a stage. A bound method: a copy of the network calls its own copy of the layer."""
        return self(output)


def places(net: Net, stages: Sequence[int], stem: bool, insert: str) -> list[str]:
    """The paths of the modules after which an insert acts; those of a decoder are left out.

    Raises UserError, with the insert's name, where the backbone has none of these stages.
    """
    has_stem = stem and all(hasattr(net.backbone, name) for name in STEM)
    paths = [f"backbone.{name}" for name in STEM] if has_stem else []
    for stage in stages:
        encoder = [path for path in net.stages.get(stage, ()) if not path.endswith("decoder")]
        paths += encoder[-1:]
    if not paths:
        raise UserError(f"insert {insert}: the backbone has none of the stages {list(stages)}; use a ResNet, "
                        "densenet121 or digits-cnn-bn")  # fmt: skip
    return paths


@dataclass(frozen=True)
class DSU(Insert):
    """y = (x - mu) / sigma gamma + beta,  beta = mu + e_1 S_mu,  gamma = sigma + e_2 S_sigma,  e_1, e_2 ~ N(0, 1).

    mu and sigma = sqrt(unbiased variance + eps) are of each image and channel, S_mu and S_sigma the square roots of
    their unbiased variance over the batch, plus eps, per channel. Noise is drawn for each image and channel. Gradients
    flow through all of them.

    Source: DSU (Li et al., ICLR 2022), from the released code (lixiaotong97/DSU 82a1de0). In a ResNet the layers act
    after the first convolution, after its max-pooling and after the four stages; other backbones have the stages alone.
    Every client sees one domain, so that the spread is the one within it. The layers have no parameters and no state
    and cost one pass over a map. `p = 0` gives the network without them.

    p: the probability of drawing per call, for the whole batch; 0.5 on PACS and Office-Home
    eps: is added to variances before the root
    stages: the stages after which layers act; stages that a backbone lacks are left out
    stem: whether layers act in the stem of a ResNet too
    """

    assumes = (Fact.IMAGES,)
    tasks: ClassVar[tuple[str, ...]] = ANY_TASK
    order: ClassVar[int] = 0
    side_by_side: ClassVar[bool] = False  # a draw decides for a whole batch

    p: Annotated[float, Field(ge=0, le=1), Tuned("0.1,0.3,0.5", "ours: around the paper's 0.5")] = 0.5
    eps: Annotated[float, Field(gt=0)] = 1e-6
    stages: tuple[int, ...] = (1, 2, 3, 4)
    stem: bool = True

    def apply(self, net: Net) -> None:
        """Adds the layers as hooks, without new state names. UserError when the backbone has none of the places."""
        net.redrawn_styles = nn.ModuleList()
        for path in places(net, self.stages, self.stem, "DSU"):
            layer = RedrawnStyles(self.p, self.eps)
            net.redrawn_styles.append(layer)
            net.get_submodule(path).register_forward_hook(layer.after)
