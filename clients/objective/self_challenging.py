"""Representation self-challenging: the classifier must predict without the features that it relies on most."""

import itertools
import math
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.parts import Batch, LocalRound, Objective, StepFunction
from clients.tools.cut_network import CutNetwork
from clients.tools.networks import statistics_frozen
from fedsim.settings.tuned import Tuned

# The constants of the released code (variant "official").
SPATIAL, CHANNELS = 1 / 3, 1 / 3.2  # share of positions, or of channels, that is masked
START, GROWTH, INTERVAL = 0.3, 0.2, 10  # first share of the batch, and by how much it grows in so many local epochs
MARGIN = 1e-4  # a sample counts as changed when its probability falls by more than this


@dataclass(frozen=True)
class SelfChallenging(Objective):
    """L = CE(h(z * M), y) + terms: the features z with the largest gradient of the true class's score are set to 0.

        g = d o_y / (d z),  M_i = 1[g_i < percentile_(1-f)(g)]
        M = 1 for a sample whose probability of its class falls less than the batch's percentile_(1-b)

    Source: RSC (Huang et al., ECCV 2020). Variant "domainbed" is this vector form, on the features that the
    head sees (with a bottleneck, those of the bottleneck). Terms see z without the mask, and the logits with
    it. No value of the settings gives FedAvg: with f = 0 the largest entry is still masked, and with b = 0 the most
    changed sample, because the comparison is strict.

    Variant "official" is the released code. It masks the last feature map (`net.levels`) before the pooling: with
    probability 1/2 the third of the positions with the largest sum_c mean_HW(g)_c U_c, else the 1/3.2 of the channels
    with the largest mean gradient. It does so for a share of the batch that grows: 0.3 + 0.2 floor(e / 10), where e is
    the number of local epochs since the run began. Mirrored copies double the batch, and with it the cost. f and b have
    no effect there.

    variant: "domainbed" (the vector form) or "official" (the released code)
    f: the share of the features that is masked
    b: the share of the batch in which they are masked
    """

    variant: Literal["domainbed", "official"] = "domainbed"
    f: Annotated[float, Field(ge=0, le=1), Tuned("uniform:0:0.5", "DomainBed (RSC)", variant="domainbed")] = 1 / 3
    b: Annotated[float, Field(ge=0, le=1), Tuned("uniform:0:0.5", "DomainBed (RSC)", variant="domainbed")] = 1 / 3

    @property
    def needs_levels(self) -> bool:
        """The form of the released code masks a feature map."""
        return self.variant == "official"

    @property
    def compiles(self) -> bool:
        """The form of the released code stops the pass at that map."""
        return self.variant != "official"

    def begin(self, round: LocalRound) -> StepFunction:
        """The loss of masked features."""
        return self._on_map(round) if self.variant == "official" else self._on_features(round)

    def _on_features(self, round: LocalRound) -> StepFunction:
        def loss(batch: Batch) -> Tensor:
            round.forward(batch)
            features = batch.features
            if not features.requires_grad:  # nothing before the head is trained (`model.train`)
                features = features.detach().requires_grad_()
                with round.autocast():
                    batch.logits = round.net.head(features)
            mask = feature_mask(saliency(batch.logits, batch.labels, features), self.f)
            with torch.no_grad(), round.autocast():
                muted = round.net.head(features * mask)
            challenged = most_changed(batch.logits, muted, batch.labels, self.b)
            return loss_with(round, batch, features * torch.where(challenged[:, None], mask, 1.0))

        return loss

    def _on_map(self, round: LocalRound) -> StepFunction:
        net, generator = round.net, round.generator("self-challenging")
        cut = CutNetwork(net, net.levels[-1])
        taken = itertools.count()

        def draw(batch: Batch) -> tuple[float, bool]:
            add_mirrored(batch)
            share = batch_share(epochs_done(round, next(taken)))
            return share, bool(torch.rand((), generator=generator) < 0.5)

        def loss(batch: Batch) -> Tensor:
            share, spatial = batch.once(self, lambda: draw(batch))
            with round.autocast():
                level = cut.front(batch.images)
                with statistics_frozen(net):
                    leaf = level.detach().requires_grad_()
                    logits = net.head(cut.tail(leaf))
                    gradient = saliency(logits, batch.labels, leaf)
                    mask = spatial_mask(leaf.detach(), gradient) if spatial else channel_mask(gradient)
                    with torch.no_grad():
                        muted = net.head(cut.tail(leaf * mask))
                challenged = largest_falls(logits, muted, batch.labels, share)
                batch.features = cut.tail(level * torch.where(challenged[:, None, None, None], mask, 1.0))
            return loss_with(round, batch, batch.features)

        return loss


def add_mirrored(batch: Batch) -> None:
    """Every image a second time, mirrored, in all that loss and terms see; `raw` and `prepare` do not change."""
    batch.images = torch.cat([batch.images, batch.images.flip(-1)])
    batch.labels = batch.labels.repeat(2)
    if batch.augmented is not None and batch.positions is not None:
        batch.augmented = torch.cat([batch.augmented, batch.augmented.flip(-1)])
        batch.positions = np.tile(batch.positions, 2)


def loss_with(round: LocalRound, batch: Batch, muted: Tensor) -> Tensor:
    """The cross-entropy of the masked features."""
    with round.autocast():
        batch.logits = round.net.head(muted)
    batch.loss = round.task.loss(batch.logits, batch.labels)
    return batch.loss


def saliency(logits: Tensor, labels: Tensor, inputs: Tensor) -> Tensor:
    """g: the gradient of the sum of the true classes' scores with respect to `inputs`, without a graph."""
    score = logits.gather(1, labels[:, None]).sum()
    return torch.autograd.grad(score, inputs, retain_graph=True)[0].float()


def feature_mask(gradient: Tensor, f: float) -> Tensor:
    """1 where an entry of g [B, D] is below the (1 - f) percentile of its row (linear interpolation), else 0."""
    return (gradient < percentile(gradient, 1 - f, dim=1)).float()


def percentile(values: Tensor, q: float, dim: int) -> Tensor:
    """The q-quantile along `dim`, which stays; linear interpolation, rounded to float32.

    It is computed in float64. Where q (N - 1) is a whole number the quantile is an entry itself, and float32's rounding
    of the rank would put it just above that entry, which then changes sides.
    """
    return values.double().quantile(q, dim=dim, keepdim=True).float()


def true_class(logits: Tensor, labels: Tensor) -> Tensor:
    """The probability of the true class, [B]."""
    return logits.detach().float().softmax(1).gather(1, labels[:, None])[:, 0]


def most_changed(before: Tensor, after: Tensor, labels: Tensor, b: float) -> Tensor:
    """The samples [B] whose probability fell at least by the batch's (1 - b) percentile; a single one always counts."""
    fall = true_class(before, labels) - true_class(after, labels)
    return fall >= percentile(fall, 1 - b, dim=0)


def spatial_mask(level: Tensor, gradient: Tensor) -> Tensor:
    """0 at the ceil(HW/3) positions of each map with the largest channel-weighted activation, [B, 1, H, W]."""
    weighted = (level.float() * gradient.mean((2, 3), keepdim=True)).sum(1, keepdim=True)
    return below_largest(weighted.flatten(1), SPATIAL).reshape(weighted.shape)


def channel_mask(gradient: Tensor) -> Tensor:
    """0 for the ceil(C/3.2) channels of each image with the largest mean gradient, [B, C, 1, 1]."""
    return below_largest(gradient.mean((2, 3)), CHANNELS)[:, :, None, None]


def below_largest(values: Tensor, share: float) -> Tensor:
    """1 where an entry of a row [B, N] is not among its ceil(share N) largest (ties stay), else 0."""
    count = min(math.ceil(values.shape[1] * share), values.shape[1] - 1)
    limit = values.sort(1, descending=True).values[:, count]
    return (values <= limit[:, None]).float()


def largest_falls(before: Tensor, after: Tensor, labels: Tensor, share: float) -> Tensor:
    """The samples [B] among the round(share B) with the largest fall of their probability, if it exceeds the margin."""
    fall = (true_class(before, labels) - true_class(after, labels) - MARGIN).clamp_min(0)
    count = min(round(share * len(fall)), len(fall) - 1)
    return fall > fall.sort(descending=True).values[count]


def batch_share(epochs: float) -> float:
    """The share of the batch that is masked after so many local epochs of the whole run."""
    return min(START + GROWTH * math.floor(epochs / INTERVAL), 1.0)


def epochs_done(round: LocalRound, steps: int) -> float:
    """Local epochs since the run began, with the first `steps` of this round. All rounds count as equally long."""
    return round.epochs * (max(round.round, 1) - 1 + steps / max(round.steps, 1))
