"""MixNorm: a small share of instance statistics over several views of each image is mixed into the global ones."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedsim.common.tasks import ANY_TASK
from fedsim.models.infer.base import Batches, Infer, Predict, Uploads
from fedsim.models.infer.statistics import with_rule
from fedsim.models.net import Net
from fedsim.models.norms.moments import batch_moments, running
from fedsim.parts.facts import Fact
from fedsim.settings.tuned import Tuned


@dataclass(frozen=True)
class MixNorm(Infer):
    """V views of each image are run together, and every layer normalizes them by

        mu = m mu_loc + (1 - m) mu_G,   sigma^2 = m sigma_loc^2 + (1 - m) sigma_G^2.

    mu_loc and sigma_loc^2 are only over the views and positions of that image. The prediction is that of the original
    view, and mu_G is not updated, so that the rule is inductive. `m = 0` gives eval mode.

    Source: Hu et al. 2021.

    views: V, the image itself and V - 1 random resized crops, flipped or not; FedIG-A has 5, which costs five times as
    much
    m: the weight of the image's own statistics, known to us from a secondary description; select it on source
    validation from {0.05, 0.1, 0.3, 0.5}
    scale: the smallest area of a crop (our choice); crops are drawn once from `seed` and are equal for all images
    seed: the seed of these crops
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK

    views: Annotated[int, Field(ge=1)] = 5
    m: Annotated[float, Field(ge=0, le=1), Tuned("0.05,0.1,0.3,0.5", "ours: from the paper's value on")] = 0.05
    scale: Annotated[float, Field(gt=0, le=1)] = 0.7
    seed: Annotated[int, Field(ge=0)] = 0
    assumes = (Fact.BATCH_NORM, Fact.IMAGES)

    def begin(self, net: Net, batches: Batches, uploads: Uploads | None = None) -> Predict:
        """A network that runs over the views of each image."""

        def rule(mean: Tensor, variance: Tensor, bn: nn.BatchNorm2d, positions: int) -> tuple[Tensor, Tensor]:
            shape = (self.views, -1, mean.shape[1])
            mean, variance = batch_moments(mean.view(shape), variance.view(shape))
            mean_g, variance_g = running(bn)
            mu = self.m * mean + (1 - self.m) * mean_g
            sigma = torch.sqrt(self.m * variance + (1 - self.m) * variance_g + bn.eps)
            return mu.repeat(self.views, 1), sigma.repeat(self.views, 1)

        ruled = with_rule(net, rule, pooled=self.views > 1)
        # Five numbers in [0, 1) for each crop; drawn beforehand, because an exported program cannot draw.
        generator = torch.Generator().manual_seed(self.seed)
        draws = [torch.rand(5, generator=generator).tolist() for _ in range(self.views - 1)]
        return lambda images: ruled(self.make_views(images, draws))[: images.shape[0]]

    def make_views(self, images: Tensor, draws: list[list[float]]) -> Tensor:
        """[B, C, H, W] to [V * B, C, H, W], with the original images first."""
        height, width = images.shape[2:]
        views = [images]
        for area, ratio, top, left, flip in draws:
            side = math.sqrt(self.scale + (1 - self.scale) * area)
            stretch = math.sqrt((3 / 4) ** (1 - 2 * ratio))
            sides = ((height, side * stretch), (width, side / stretch))
            h, w = (max(round(size * min(factor, 1.0)), 1) for size, factor in sides)
            y, x = round(top * (height - h)), round(left * (width - w))
            view = F.interpolate(images[:, :, y : y + h, x : x + w], (height, width), mode="bilinear")
            views.append(view.flip(3) if flip < 0.5 else view)
        return torch.cat(views)
