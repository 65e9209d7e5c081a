"""Mixtures of instance and global statistics by one number: fixed, random, or from the zero-shot adapter."""

import logging
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.common.errors import UserError
from fedsim.common.tasks import ANY_TASK
from fedsim.models.infer.base import Batches, Infer, Predict, Uploads
from fedsim.models.infer.statistics import with_rule
from fedsim.models.net import Net
from fedsim.models.norms.mixig import mixig_layers, switched
from fedsim.models.norms.moments import running
from fedsim.parts.facts import Fact
from fedsim.settings.experiment import Experiment

NO_ADAPTER = "infer 'zero_shot_adapter' needs the norm 'mix_ig' with adapter = true"

QUANTITIES = ("alpha", "alpha_std", "alpha_min", "alpha_max")
log = logging.getLogger(__name__)


def mix_by(alpha: Tensor | float, mean: Tensor, variance: Tensor, bn: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """mu = alpha mu_i + (1 - alpha) mu_G, sigma = alpha sigma_i + (1 - alpha) sigma_G; standard deviations are mixed.

    sigma = sqrt(var + eps) on both sides, and the instance variance is biased.
    """
    mean_g, variance_g = running(bn)
    std, std_g = torch.sqrt(variance + bn.eps), torch.sqrt(variance_g + bn.eps)
    return alpha * mean + (1 - alpha) * mean_g, alpha * std + (1 - alpha) * std_g


@dataclass(frozen=True)
class FixedAlpha(Infer):
    """The same alpha in every layer, by which statistics of the image itself are mixed with the global ones:

        mu = alpha mu_i + (1 - alpha) mu_G,   sigma = alpha sigma_i + (1 - alpha) sigma_G

    mu_i and sigma_i are the mean and sqrt(biased variance + eps) of the image in a channel. `alpha = 0` gives eval
    mode. The rule is inductive.

    Source: Table 3 of FedIG-A (submission to ICLR 2023).

    alpha: the weight of the image's own statistics
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK

    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    assumes = (Fact.BATCH_NORM, Fact.IMAGES)

    def begin(self, net: Net, batches: Batches, uploads: Uploads | None = None) -> Predict:
        """A network that mixes by alpha."""
        return with_rule(net, lambda mean, variance, bn, positions: mix_by(self.alpha, mean, variance, bn))


@dataclass(frozen=True)
class RandomAlpha(Infer):
    """alpha ~ U(low, high) per sample and layer, drawn again from `seed` in every evaluation. The rule is inductive.

    mu and sigma are mixed by alpha as in `fixed_alpha`. Source: Table 3 of FedIG-A (submission to ICLR 2023).

    low, high: the bounds of alpha; `low = high = 0` gives eval mode
    seed: the seed of these draws
    batch: the number of images for which the layers draw in turn, for every size of the evaluation batches
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK

    low: Annotated[float, Field(ge=0, le=1)] = 0.0
    high: Annotated[float, Field(ge=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=0)] = 0
    batch: Annotated[int, Field(ge=1)] = 256
    assumes = (Fact.BATCH_NORM, Fact.IMAGES)
    random: ClassVar[bool] = True

    def check(self, experiment: Experiment) -> None:
        """The bounds in their order."""
        if self.low > self.high:
            raise UserError(f"random_alpha.low = {self.low:g} is greater than random_alpha.high = {self.high:g}")

    def begin(self, net: Net, batches: Batches, uploads: Uploads | None = None) -> Predict:
        """A network that draws its alphas."""
        generator = torch.Generator().manual_seed(self.seed)

        def rule(mean: Tensor, variance: Tensor, bn: nn.BatchNorm2d, positions: int) -> tuple[Tensor, Tensor]:
            draw = torch.rand(len(mean), 1, generator=generator).to(mean.device)
            return mix_by(self.low + (self.high - self.low) * draw, mean, variance, bn)

        ruled = with_rule(net, rule)
        return lambda images: torch.cat([ruled(part) for part in images.split(self.batch)])


@dataclass(frozen=True)
class ZeroShotAdapter(Infer):
    """alpha = clamp(eps, 0, 1) of each layer's adapter, per image, in one forward pass.

    mu and sigma are mixed by alpha as in `fixed_alpha`. Source: FedIG-A (submission to ICLR 2023).

    The rule is deterministic, and the result for an image does not depend on other images. It records the
    mean, standard deviation, minimum and maximum of alpha of every layer over the images. It warns once
    about a layer with alpha 0 or 1 for every image: the clamp has no gradient there, so that the adapter of
    the layer does not learn any more.
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK

    on_sources: ClassVar[bool] = True
    assumes = (Fact.ADAPTERS,)
    quantities: ClassVar[tuple[str, ...]] = QUANTITIES

    def begin(self, net: Net, batches: Batches, uploads: Uploads | None = None) -> Predict:
        """The network with its adapters switched on. Raises UserError when it has none."""
        net.eval()
        layers = mixig_layers(net)
        if not any(layer.adapter is not None for layer in layers.values()):
            raise UserError(NO_ADAPTER)
        for layer in layers.values():
            layer.alphas = []

        def predict(images: Tensor) -> Tensor:
            with switched(layers, "adapted"):
                logits = net(images)
            for layer in layers.values():
                if layer.alpha is not None:
                    layer.alphas.append(layer.alpha)
                    layer.alpha = None
            return logits

        return predict

    def alphas(self, net: Net) -> dict[str, Tensor]:
        """alpha [N] of each layer with an adapter, float64, for the N images since `begin`."""
        layers = mixig_layers(net)
        return {path: torch.cat(layer.alphas).double() for path, layer in layers.items() if layer.alphas}

    def details(self, net: Net) -> list[tuple[str, str, float]]:
        """Mean, standard deviation, minimum and maximum of each layer's alpha over the images since `begin`."""
        rows: list[tuple[str, str, float]] = []
        stuck = []
        layers = mixig_layers(net)
        for path, alphas in self.alphas(net).items():
            layer = layers[path]
            low, high = float(alphas.min()), float(alphas.max())
            values = (float(alphas.mean()), float(alphas.std(correction=0)), low, high)
            rows += [(name, path, value) for name, value in zip(QUANTITIES, values, strict=True)]
            if low == high and low in (0.0, 1.0) and not layer.at_bound:
                layer.at_bound = True
                stuck.append(f"{path} ({low:g})")
        if stuck:
            log.warning(
                "alpha is the same bound for every image in %s: these adapters get no gradient any more and have no "
                "effect; see alpha_min and alpha_max in details.csv",
                ", ".join(stuck),
            )
        return rows
