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
from fedsim.settings.tuned import DECADE, Tuned


class Mixture(Objective):
    """The task's loss of x' = w x_i + (1 - w) x_p(i) and s y_i + (1 - s) y_p(i), where s is the mean of w."""

    breaks = (Fact.HARD_LABELS,)
    alpha: float

    def begin(self, round: LocalRound) -> StepFunction:
        """The loss of the mixture, which is drawn once for a batch."""
        rng = round.rng("mixture")

        def loss(batch: Batch) -> Tensor:
            batch.images, batch.soft = batch.once(self, lambda: self.mixed(round, batch, rng))
            return round.forward(batch)

        return loss if self.alpha else round.forward

    def mixed(self, round: LocalRound, batch: Batch, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Images [B, C, H, W] and soft labels of the mixture of a batch with a permutation p of itself."""
        other = on_device(rng.permutation(len(batch.images)), batch.images.device)
        weights = self.weights(batch.images.shape[-2], batch.images.shape[-1], rng)
        w, s = on_device(weights, batch.images.device), float(weights.mean())
        labels = round.task.soft(batch.labels, round.classes)
        return w * batch.images + (1 - w) * batch.images[other], s * labels + (1 - s) * labels[other]

    def weights(self, height: int, width: int, rng: np.random.Generator) -> np.ndarray:
        """w, float32 [H, W], or [1, 1] for all pixels."""
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
    alpha: Annotated[float, Field(ge=0), Tuned("log:0.1:10", "DomainBed")] = 0.2

    def weights(self, height: int, width: int, rng: np.random.Generator) -> np.ndarray:
        """lam for all pixels."""
        return np.full((1, 1), rng.beta(self.alpha, self.alpha), np.float32)


@dataclass(frozen=True)
class CutMix(Mixture):
    """L = CE(h(f(x')), s y_i + (1 - s) y_p(i)) + terms; x' is x_i with a box of x_p(i), and s the share of x_i in it.

    The box has the sides sqrt(1 - lam) H and sqrt(1 - lam) W, each rounded down to an even number, with
    lam ~ Beta(alpha, alpha), around a uniform pixel; what lies outside the image is cut off.

    Source: CutMix (Yun et al., ICCV 2019), with one box and one permutation p for a batch as in the released code. It
    acts on every batch, as in that code's runs on ImageNet. Terms see the mixture. `alpha = 0` gives FedAvg.

    alpha: the parameter of the Beta distribution
    """

    assumes = (Fact.OBJECTIVE, Fact.IMAGES)
    alpha: Annotated[float, Field(ge=0), Tuned("log:0.1:10", DECADE)] = 1.0

    def weights(self, height: int, width: int, rng: np.random.Generator) -> np.ndarray:
        """0 in the box, 1 outside."""
        weights, side = np.ones((height, width), np.float32), (1 - rng.beta(self.alpha, self.alpha)) ** 0.5
        centres = ((size, int(rng.integers(size)), int(size * side) // 2) for size in (height, width))
        weights[tuple(slice(max(centre - half, 0), min(centre + half, size)) for size, centre, half in centres)] = 0
        return weights
