"""RandConv: random convolutions change the local texture of training images."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from clients.parts import Batch, LocalRound, Objective, StepFunction
from clients.tools.losses import js_divergence
from fedsim.parts.facts import Fact
from fedsim.settings.effect import Only
from fedsim.settings.tuned import DECADE, Tuned


@dataclass(frozen=True)
class RandomConvolution(Objective):
    """L = CE(p_0, y) + weight JS(p_0, p_1, p_2) + terms, where p_v are the predictions for three views of the batch.

        RC(x) = conv(k, x),  k of size s x s, s uniform over `sizes`, entries N(0, 1/(C s^2)), one for the whole batch
        "mix":    view = alpha RC(x) + (1 - alpha) x,  alpha ~ U(0, 1)
        "img_p":  view = x with probability p, else RC(x)
        JS = mean_v KL(p_v || M), where M is the mean of the three, clipped at 1e-7; mean over the batch

    Source: RandConv (Xu et al., ICLR 2021). x are normalized images with C channels. The kernels map C channels
    to C without bias, and the images keep their size. Each step has three kernels and three forward passes;
    terms see the first view. In the released trainer, the second and third views are convolutions of the first.
    The authors did not publish their script for PACS: our default is `mix` with the weight of the settings for
    digits, 10 (5 with `img_p`). `weight = 0` makes one pass; with `img_p` and p = 1 this is FedAvg.

    weight: the weight of JS
    variant: `mix` or `img_p`
    p: the probability of an unchanged view with `img_p`
    sizes: the sizes of the kernels, which are odd
    """

    assumes = (Fact.OBJECTIVE, Fact.IMAGES)

    variant: Literal["mix", "img_p"] = "mix"
    weight: Annotated[float, Field(ge=0), Tuned("log:1:100", DECADE)] = 10.0
    p: Annotated[float, Field(ge=0, le=1), Only(variant="img_p")] = 0.5
    sizes: tuple[Literal[1, 3, 5, 7, 9, 11], ...] = (1, 3, 5, 7)
    columns: ClassVar[tuple[str, ...]] = ("js_loss",)

    def begin(self, round: LocalRound) -> StepFunction:
        """The loss of three views, or of one when the weight is 0."""
        net, generator, count = round.net, round.generator("random-convolution"), 3 if self.weight else 1

        def loss_of(batch: Batch) -> Tensor:
            batch.images, *others = batch.once(self, lambda: [self.view(batch.images, generator) for _ in range(count)])
            loss = round.forward(batch)
            if others:
                with round.autocast():
                    logits = [batch.logits, *(net(view) for view in others)]
                divergence = js_divergence(logits)
                round.tally("js_loss", divergence)
                loss = loss + self.weight * divergence
            return loss

        return loss_of

    def view(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """One random version of images [B, C, H, W]."""
        alpha = float(torch.rand((), generator=generator))
        kernel = random_kernel(images.shape[1], self.sizes, generator).to(images, non_blocking=True)
        if self.variant == "img_p":
            return images if alpha < self.p else convolved(images, kernel)
        return torch.lerp(images, convolved(images, kernel), alpha)


def random_kernel(channels: int, sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """k [C, C, s, s] with entries N(0, 1 / (C s^2))."""
    size = sizes[int(torch.randint(len(sizes), (), generator=generator))]
    deviation = (channels * size * size) ** -0.5
    return deviation * torch.randn(channels, channels, size, size, generator=generator)


def convolved(images: Tensor, kernel: Tensor) -> Tensor:
    """The images convolved with the kernel, padded by zeros to keep their size."""
    return F.conv2d(images, kernel, padding=kernel.shape[-1] // 2)
