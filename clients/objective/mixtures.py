"""Mixup and CutMix: the network learns from mixtures of two images with mixed labels."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from torch import Tensor

from clients.local_data import on_device
from clients.parts import Batch, LocalRound, Objective, StepFunction
from fedsim.common.tasks import ANY_TASK
from fedsim.parts.facts import Fact


class Mixture(Objective):
    """What both have in common: a mixture of the batch with a permutation of itself, drawn once for a batch."""

    breaks = (Fact.HARD_LABELS,)
    alpha: float

    def begin(self, round: LocalRound) -> StepFunction:
        """The task's loss of the mixture with its soft labels."""
        if self.alpha == 0:
            return round.forward
        rng = round.rng("mixture")

        def loss(batch: Batch) -> Tensor:
            batch.images, batch.soft = batch.once(self, lambda: self._mixed(round, batch, rng))
            return round.forward(batch)

        return loss

    def _mixed(self, round: LocalRound, batch: Batch, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        other = on_device(rng.permutation(len(batch.images)), batch.images.device)
        images, share = self.mixed(batch.images, batch.images[other], float(rng.beta(self.alpha, self.alpha)), rng)
        labels = round.task.soft(batch.labels, round.classes)
        return images, share * labels + (1 - share) * labels[other]

    def mixed(self, images: Tensor, others: Tensor, lam: float, rng: np.random.Generator) -> tuple[Tensor, float]:
        """The mixture of images [B, C, H, W] and the share of the first ones in it."""
        raise NotImplementedError


@dataclass(frozen=True)
class MixUp(Mixture):
    """L = loss(h(f(lam x_i + (1 - lam) x_p(i))), lam y_i + (1 - lam) y_p(i)) + terms, with lam ~ Beta(alpha, alpha).

    Source: mixup (Zhang et al., ICLR 2018), which has one lam for a batch and draws its permutation p, as we do, and
    mixes the images as the network gets them. DomainBed has alpha = 0.2 and mixes batches of two domains; a client has
    one. Labels are one-hot vectors, or masks. Terms see the mixture. `alpha = 0` gives FedAvg.

    alpha: the parameter of the Beta distribution
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK
    alpha: Annotated[float, Field(ge=0)] = 0.2

    def mixed(self, images: Tensor, others: Tensor, lam: float, rng: np.random.Generator) -> tuple[Tensor, float]:
        """lam x + (1 - lam) x'."""
        return lam * images + (1 - lam) * others, lam


@dataclass(frozen=True)
class CutMix(Mixture):
    """L = CE(h(f(x')), s y_i + (1 - s) y_p(i)) + terms; x' is x_i with a box of x_p(i), and s the share of x_i in it.

    The box has the sides sqrt(1 - lam) H and sqrt(1 - lam) W, rounded down, with lam ~ Beta(alpha, alpha), around a
    uniform pixel; what lies outside the image is cut off.

    Source: CutMix (Yun et al., ICCV 2019), with one box and one permutation p for a batch as in the released code. It
    acts on every batch, as in that code's runs on ImageNet. Terms see the mixture. `alpha = 0` gives FedAvg.

    alpha: the parameter of the Beta distribution
    """

    alpha: Annotated[float, Field(ge=0)] = 1.0

    def mixed(self, images: Tensor, others: Tensor, lam: float, rng: np.random.Generator) -> tuple[Tensor, float]:
        """x with a box of x'."""
        height, width = images.shape[-2:]
        box = np.ones((height, width), bool)
        rows, columns = (cut_out(size, lam, int(rng.integers(size))) for size in (height, width))
        box[rows, columns] = False
        kept = on_device(box, images.device)
        return kept * images + ~kept * others, float(box.mean())


def cut_out(size: int, lam: float, centre: int) -> slice:
    """The part of a side of that size which the box takes."""
    length = int(size * (1 - lam) ** 0.5)
    return slice(max(centre - length // 2, 0), min(centre + length // 2, size))
