"""MixStyle: instance statistics are mixed inside the batch, between the stages of a network."""

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
from fedsim.settings.tuned import DECADE, Tuned

Style = tuple[Tensor, Tensor]  # mean and standard deviation of each sample and channel, [B, C, 1, 1]


def style_of(x: Tensor, eps: float = 1e-6) -> Style:
    """Mean and sqrt(unbiased variance + eps) of each sample and channel of x [B, C, H, W], without a gradient."""
    variance, mean = torch.var_mean(x.detach(), dim=(2, 3), keepdim=True)
    return mean, torch.sqrt(variance + eps)


def moved_style(x: Tensor, own: Style, other: Style, lam: Tensor) -> Tensor:
    """Each map x [B, C, H, W], with its statistics (m, s) moved towards others (m_o, s_o); lam [B]:

    out = (x - m)/s (lam s + (1 - lam) s_o) + lam m + (1 - lam) m_o

    It is computed as x a + (b - m a), which saves a pass over the map. Where a map is nearly constant, the two products
    cancel: in float32 the error is up to 3e-5 there, and in bfloat16 five times that of the order above.
    """
    (mean, std), (other_mean, other_std) = own, other
    lam = lam.to(x.dtype)[:, None, None, None]
    mixed_mean = lam * mean + (1 - lam) * other_mean
    slope = lam + (1 - lam) * other_std / std
    return x * slope + (mixed_mean - mean * slope)


def mix_styles(x: Tensor, permutation: Tensor, lam: Tensor, eps: float = 1e-6) -> Tensor:
    """Each map, with its statistics moved towards those of the sample `permutation` [B] of the same batch, lam [B]."""
    mean, std = style_of(x, eps)
    return moved_style(x, (mean, std), (mean[permutation], std[permutation]), lam)


class MixStyleLayer(nn.Module):
    """Mixes the styles of a training batch with probability p per call; the identity in eval mode and for one sample.

        y = (x - m) / s (lam s + (1 - lam) s_pi) + lam m + (1 - lam) m_pi

    m and s are the mean and sqrt(unbiased variance + eps) of each sample and channel, without a gradient; m_pi and s_pi
    are those of another sample of the batch (see `mix_styles`).

    second_view: a step with a second pass turns it off for the first pass; otherwise it is on
    """

    def __init__(self, p: float, alpha: float, eps: float) -> None:
        super().__init__()
        self.p, self.alpha, self.eps = p, alpha, eps
        self.second_view = True

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] to the same shape. Draws come from torch's generator, which is seeded per client and round."""
        if not self.training or not self.second_view or len(x) < 2 or float(torch.rand(())) >= self.p:
            return x
        if x.shape[2] * x.shape[3] < 2:
            return x
        lam = torch.distributions.Beta(self.alpha, self.alpha).sample((len(x),))
        order = torch.randperm(len(x)).to(x.device, non_blocking=True)
        return mix_styles(x, order, lam.to(x.device, non_blocking=True), self.eps)

    def after(self, module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        """A forward hook of a stage. A bound method: a copy of the network calls its own copy of the layer."""
        return self(output)


@dataclass(frozen=True)
class MixStyle(Insert):
    """MixStyle layers after stages of the backbone, with a random permutation (Zhou et al., ICLR 2021).

    Every client sees one domain, so that styles are mixed within it. On digits-cnn-bn stage 1 ends with its second
    norm. The layers have no parameters and no state. `p = 0` gives the network without them.

    p: the probability of mixing per call, for the whole batch
    alpha: lam ~ Beta(alpha, alpha) per sample
    eps: is added to the variance before the root
    stages: (1, 2, 3) on PACS, (1, 2) on OfficeHome; stages that a backbone lacks are left out
    """

    assumes = (Fact.IMAGES,)
    tasks: ClassVar[tuple[str, ...]] = ANY_TASK
    order: ClassVar[int] = 0  # before what reads the last map: on digits-cnn-bn stage 1 is the last
    side_by_side: ClassVar[bool] = False  # a draw decides for a whole batch whether its styles are mixed

    p: Annotated[float, Field(ge=0, le=1)] = 0.5
    alpha: Annotated[float, Field(gt=0), Tuned("log:0.01:1", DECADE)] = 0.1
    eps: Annotated[float, Field(gt=0)] = 1e-6
    stages: tuple[int, ...] = (1, 2, 3)
    second_view: ClassVar[bool] = True

    def apply(self, net: Net) -> None:
        """Adds the layers as hooks, without new state names. UserError when the backbone has none of the stages."""
        paths = [net.stages[stage][-1] for stage in self.stages if stage in net.stages]
        if not paths:
            raise UserError(f"insert MixStyle: the backbone has none of the stages {list(self.stages)}; use a ResNet, "
                            "densenet121 or digits-cnn-bn")  # fmt: skip
        layers = [MixStyleLayer(self.p, self.alpha, self.eps) for _ in paths]
        net.inserts = nn.ModuleList(layers)
        for path, layer in zip(paths, layers, strict=True):
            net.get_submodule(path).register_forward_hook(layer.after)
