"""FedCCRL's training: images in the colours of other clients, whose features and predictions must agree."""

import logging
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from clients.augment.aug_mix import STRENGTHS, mixed
from clients.augment.cross_client_style import CrossClientStyle
from clients.parts import Batch, LocalRound, Objective, StepFunction
from clients.tools.losses import js_divergence, supervised_contrast, total
from fedsim.models.inserts.mixstyle import Style, moved_style, style_of
from fedsim.parts.facts import Fact
from fedsim.parts.part import RecipeParts
from fedsim.settings.effect import Above, Only
from fedsim.settings.tuned import DECADE, Tuned

CHUNK = 256  # images that are measured at a time
NO_ROWS = "client %s: the bank has no statistics of other clients' images; its images keep their colours"
log = logging.getLogger(__name__)


def rows_of(r: float, images: int) -> int:
    """m = floor(r n); the product is rounded first, because 0.29 * 100 is 28.999... in floating point."""
    return math.floor(round(r * images, 9))


def drawn_rows(rows: int, count: int) -> Tensor:
    """`count` of the numbers 0 to rows - 1, each at most once; each any number of times if there are fewer rows."""
    return torch.randperm(rows)[:count] if rows >= count else torch.randint(rows, (count,))


def eight_bit(images: Tensor, wraps: bool = False) -> Tensor:
    """Images with 256 values in [0, 1]: round(255 clamp(x)) / 255.

    wraps: (trunc(255 x) mod 256) / 255, as in a conversion to bytes without a clamp, where 1.04 becomes 9 / 255
    """
    if wraps:
        return (images * 255).trunc_().remainder_(256).div_(255)
    return images.clamp(0, 1).mul_(255).round_().div_(255)


def contrast_of(views: list[Tensor], labels: Tensor, temperature: float, own: bool = False) -> Tensor:
    """mean_v SC(f_v, f_0), where SC is the supervised contrastive loss of the 2 B normalized features of two views.

    views: the features [B, D] of the batch itself, then of its other views
    """
    first, *others = (F.normalize(features.float()) for features in views)
    doubled = labels.repeat(2)
    contrasts = [supervised_contrast(torch.cat([other, first]), doubled, temperature, own) for other in others]
    return total(contrasts) / len(contrasts)


@dataclass(frozen=True)
class AlignedViews(Objective):
    """L = sum_v CE(z_v, y) + lambda2 JS(z_0, ..., z_V) + lambda1 mean_{v>0} SC(f_v, f_0) + terms. z_v are the logits
    and f_v the features of the batch itself (v = 0) and of V other views of it.

        view:  AugMix(8 bit(x')),  x' = (x - mu)/sigma (lam sigma + (1 - lam) sigma') + lam mu + (1 - lam) mu'
        JS = mean_v KL(P_v || M), where M is the mean of all P_v, clipped at 1e-7
        SC(f, f_0) = mean_i [ log sum_{j != i} e^{s_ij} - mean_{j in P_i} s_ij ] over 2 B normalized features

    mu and sigma = sqrt(unbiased variance + eps) are those of a channel of the image, mu' and sigma' a row of the bank
    `pixel_stats`, i.e. of one image of another client; lam ~ Beta(alpha, alpha) for each image. Rows are drawn for
    every view, each at most once in a batch if there are enough. x' is clamped to [0, 1]. s_ij = f_i . f_j /
    temperature, P_i are the other features of the class of i.

    Source: FedCCRL (Wang et al., 2024). Each client gives mu and sigma of floor(r n_k) of its training images, before
    any augmentation, to the bank. The statistics are of images in [0, 1]; the released code has normalized images,
    which is equal up to eps. Every view makes a pass of its own through the network, which updates batch norm's running
    statistics, and all losses have gradients through all views. Terms see the batch itself. Without rows of other
    clients (the log says so) views are AugMix's alone. The released code augments images in no other way
    (data.augment = "none"). It trains MobileNetV3-Large with ImageNet weights by Adam (1e-3, weight decay 1e-4, cosine
    to 0 over all epochs, moments kept between rounds: train.persist_optimizer) in batches of 32, 10 rounds of 3 epochs
    at 224 pixels (DomainNet 128), with two clients of each domain and a tenth of the images for validation.
    `views = 0` gives FedAvg; with it, and with `p = 0`, no statistics are collected.

    lambda1: the weight of the contrast
    lambda2: the weight of the divergence
    temperature: t in the contrast
    r: the share of its training images of which a client publishes statistics
    views: V, the number of views besides the batch itself
    p: the probability with which a view of a batch gets other colours
    alpha: the parameter of the Beta distribution
    eps: is added to the variance before the root
    severity, width, all_operations: as in the augmentation `aug_mix`
    variant: `official` is the released code, where it differs: each feature is its own positive too (but is not in the
    sum over j); AugMix draws its chains once for the whole batch; values outside 0 to 255 wrap around in the conversion
    to 8 bit; and the bank has `refresh = "round"`
    """

    lambda1: Annotated[float, Field(ge=0), Tuned("log:0.01:1", DECADE)] = 0.1
    lambda2: Annotated[float, Field(ge=0), Tuned("log:0.01:1", DECADE)] = 0.1
    temperature: Annotated[float, Field(gt=0), Only(views=Above(0), lambda1=Above(0))] = 0.1
    r: Annotated[float, Field(ge=0, le=1), Only(views=Above(0), p=Above(0))] = 0.1
    views: Annotated[int, Field(ge=0)] = 2
    p: Annotated[float, Field(ge=0, le=1), Only(views=Above(0))] = 1.0
    alpha: Annotated[float, Field(gt=0), Only(views=Above(0), p=Above(0))] = 0.1
    eps: Annotated[float, Field(gt=0, le=0.1)] = 1e-6
    severity: Annotated[int, Field(ge=1, le=STRENGTHS)] = 3
    width: Annotated[int, Field(ge=1)] = 3
    all_operations: bool = True
    variant: Literal["paper", "official"] = "paper"
    assumes = (Fact.OBJECTIVE, Fact.IMAGES)
    requires: ClassVar[dict[str, str]] = {"banks": "pixel_statistics"}
    columns: ClassVar[tuple[str, ...]] = ("js_loss", "contrast_loss")

    @property
    def bank(self) -> str:
        """The record exists only where a view may get other colours."""
        return "pixel_stats" if self.views and self.p else ""

    @property
    def sets(self) -> dict[str, dict[str, object]]:
        """The released code draws new images in every round; the bank is off where no view gets other colours."""
        fields: dict[str, object] = {"refresh": "round"} if self.variant == "official" else {}
        return {"pixel_statistics": fields if self.bank else {"shared": False}}

    @property
    def discloses(self) -> str:
        """How many images the published statistics are of."""
        return f"these images are a share {self.r:g} of the client's" if self.bank else ""

    def refuses(self, recipe: RecipeParts) -> str:
        """One part at a time gives images the styles of other clients."""
        if recipe.of(CrossClientStyle):
            return (
                "aligned_views and cross_client_style both give images the styles of other clients; use one of the two"
            )
        return super().refuses(recipe)

    def collect(self, round: LocalRound) -> dict[str, np.ndarray]:
        """mean and std, float32 [floor(r n), C], of training images that are drawn at random."""
        data = round.data
        chosen = round.rng("pixel statistics").permutation(data.examples)[: rows_of(self.r, data.examples)]
        chunks = [chosen[start : start + CHUNK] for start in range(0, len(chosen), CHUNK)]
        if not chunks:
            return dict.fromkeys(("mean", "std"), np.zeros((0, data.images.shape[1]), np.float32))
        styles = zip(*(style_of(data.raw(chunk), self.eps) for chunk in chunks))
        joined = (torch.cat(values).flatten(1).cpu().numpy() for values in styles)
        return dict(zip(("mean", "std"), joined, strict=True))

    def begin(self, round: LocalRound) -> StepFunction:
        """The loss of all views, or the batch's own where it is the only one."""
        if not self.views:
            return round.forward
        styles = self.styles(round)

        def loss_of(batch: Batch) -> Tensor:
            changed = batch.once(self, lambda: [self.changed(batch.augmented, styles) for _ in range(self.views)])
            views = [batch, *(Batch(batch.normalize(images), batch.labels) for images in changed)]
            loss = total(round.forward(view) for view in views)
            if self.lambda2:
                divergence = js_divergence([view.logits for view in views])
                round.tally("js_loss", divergence)
                loss = loss + self.lambda2 * divergence
            if self.lambda1:
                official = self.variant == "official"
                contrast = contrast_of([view.features for view in views], batch.labels, self.temperature, official)
                round.tally("contrast_loss", contrast)
                loss = loss + self.lambda1 * contrast
            return loss

        return loss_of

    def styles(self, round: LocalRound) -> Style | None:
        """The rows of other clients, [N, C, 1, 1] each; None where there are none."""
        if not self.bank:
            return None
        references = round.tensors(self.bank, "aligned_views")
        if not references:
            round.remembered("no rows", self, lambda: log.warning(NO_ROWS, round.client))
            return None
        return references["mean"][:, :, None, None], references["std"][:, :, None, None]

    def changed(self, images: Tensor, styles: Style | None) -> Tensor:
        """One other view of images [B, C, H, W] in [0, 1], in this range. Draws come from torch's generator."""
        official = self.variant == "official"
        if styles is not None and float(torch.rand(())) < self.p:
            rows = drawn_rows(len(styles[0]), len(images)).to(images.device, non_blocking=True)
            lam = torch.distributions.Beta(self.alpha, self.alpha).sample((len(images),))
            lam = lam.to(images.device, non_blocking=True)
            images = moved_style(images, style_of(images, self.eps), (styles[0][rows], styles[1][rows]), lam)
        images = eight_bit(images, wraps=official)
        return mixed(images, self.severity, self.width, every=self.all_operations, alike=official)
