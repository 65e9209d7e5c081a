"""FISC's client term: features stay near those of the image in the style of all, and apart from other classes."""

import logging
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from clients.augment import style
from clients.augment.clustered_style import map_clusters, pool_clusters, style_clusters
from clients.augment.spaces import ContentVariance, Encoder, StylePart, image_statistics, space_of, style_record
from clients.augment.vgg_style import Vgg
from clients.local_data import on_device
from clients.parts import Batch, LocalRound, StepFunction, Term
from fedsim.common.errors import UserError
from fedsim.common.seeding import numpy_rng
from fedsim.parts.facts import Fact
from fedsim.parts.part import part_name
from fedsim.settings.effect import Above, Only, Size
from fedsim.settings.experiment import Experiment
from fedsim.settings.tuned import DECADE, Tuned

EPS = 1e-7  # added to every difference of the distance, so that its gradient exists at 0
log = logging.getLogger(__name__)


def triplet(features: Tensor, styled: Tensor, labels: Tensor, draws: Tensor, margin: float) -> Tensor:
    """Mean over the anchors of max(0, D(a_i, p_i) - D(a_i, p_n(i)) + margin), a scalar; 0 without anchors.

        a = f / ||f||,  p = f' / ||f'||,  D(a, b) = ||a - b + 1e-7||

    Anchors are the samples that have a sample with another label in the batch, and n(i) is one of those.

    features, styled: f and f' [B, d]; gradients reach both
    labels: classes [B]
    draws: numbers in [0, 1) [B], float64; number i chooses n(i), with equal chances
    """
    anchors, positives = F.normalize(features, dim=1), F.normalize(styled, dim=1)
    chosen, has_one = negatives(labels, draws)
    loss = (_distance(anchors, positives) - _distance(anchors, positives[chosen]) + margin).clamp_min(0)
    return torch.where(has_one, loss, 0.0).sum() / has_one.sum().clamp_min(1)


def negatives(labels: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """(for each sample [B] the place of one with another label, whether there is one [B]); `draws` as in `triplet`."""
    different = labels[:, None] != labels
    count = different.sum(1)
    rank = (draws * count).long()  # among those with another label, in the order of the batch
    chosen = (different.cumsum(1) <= rank[:, None]).sum(1)
    return chosen.clamp(max=len(labels) - 1), count > 0


def _distance(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.vector_norm(a - b + EPS, dim=1)


def mean_squares(features: Tensor, styled: Tensor) -> Tensor:
    """The mean of f^2 + f'^2 over batch and dimensions, a scalar; f and f' [B, d]."""
    return features.square().mean() + styled.square().mean()


@dataclass(frozen=True)
class StyleContrast(Term, StylePart):
    """triplet_weight * T + norm_weight * R; f and f' are the features of a batch x and of x', x in the style of all:

        T = mean_i max(0, D(f_i, f'_i) - D(f_i, f'_n(i)) + margin),   y_n(i) != y_i
        R = mean of f^2 + f'^2 over batch and dimensions,   D: the distance of normalized features
        x' = clamp(Psi(alpha A + (1 - alpha) F), 0, 1),  F = Phi(x),  A = sigma_s (F - mu(F)) / sigma(F) + mu_s

    Source: FISC / PARDON (Nguyen et al., ICDCS 2025). x' is made of the augmented batch, takes no part in the
    cross-entropy, and passes the network after x, so that batch norm sees both. Before round 1 each client sends its
    own style, and gets the style (mu_s, sigma_s) of all from the bank `interpolation`. Its own style is a mean over
    clusters of its training images, by FINCH, so that large groups of like images do not decide:

        mu_k = mean_q m_q,  sigma_k^2 = mean_q e_q - mu_k^2 + 1e-5,  m_q and e_q over all positions of cluster q

    With both weights 0 it is FedAvg, without a second pass, and nothing is sent. The released code differs: it passes
    anchors, positives and negatives through the network anew, so that batch norm sees five passes; it gives Phi the
    normalized images, with three channels, where we give it the values in [0, 1]; and see the settings. Without a style
    from the server (no client sent one) the term adds nothing.
    """

    side_by_side: ClassVar[bool] = True

    triplet_weight: Annotated[float, Field(ge=0), Tuned("log:0.075:7.5", DECADE)] = 0.75
    """The weight of T."""
    norm_weight: Annotated[float, Field(ge=0), Tuned("log:0.02:2", DECADE)] = 0.2
    """The weight of R, which is in the released code alone: 0.2, and 0.1 on Office-Home."""
    margin: Annotated[float, Field(ge=0), Only(triplet_weight=Above(0))] = 0.3
    """How much nearer the positive is to be than the negative; distances are from 0 to 2."""
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The strength of the transfer in feature space; the released code has 0.2 on FEMNIST."""
    encoder: Encoder = "pixel"
    """Phi: colour space, 3-level Haar bands, or VGG-19 up to `relu4_1` (the paper's, needs weight files). With vgg
    every step passes its batch through VGG-19 and the decoder, which takes many times the step itself."""
    cluster: Literal["features", "style"] = "features"
    """What FINCH clusters on the client: flattened feature maps, which show what is on an image (released code), or
    each image's (mu, sigma)."""
    clustered: Annotated[int, Field(ge=1), Only(Size.CLIENT_IMAGES)] = 2000
    """The largest number of images of which the client's style is made. A client with more draws them, and says so in
    the log: FINCH compares all pairs."""
    statistics_layer: Literal["same", "before_relu"] = "same"
    """Where clients measure their styles with vgg: in the layer of the transfer, or before its ReLU (released code)."""
    content_variance: ContentVariance = "population"
    """The variance in sigma(F) of the transfer ("unbiased": released code); that of styles is the population's."""
    encoder_weights: Annotated[str, Only(encoder="vgg")] = ""
    """Local file of the normalized VGG-19."""
    decoder_weights: Annotated[str, Only(encoder="vgg")] = ""
    """Local file of the AdaIN decoder."""

    assumes = (Fact.IMAGES, Fact.ROWS, Fact.HARD_LABELS)
    requires: ClassVar[dict[str, str]] = {"banks": "interpolation_style"}
    columns: ClassVar[tuple[str, ...]] = ("triplet_loss", "norm_loss")

    @property
    def bank(self) -> str:
        """The record exists only where a weight is not 0."""
        return "interpolation" if self.triplet_weight or self.norm_weight else ""

    @property
    def sets(self) -> dict[str, dict[str, object]]:
        """A bank to which nothing is sent where the term adds nothing."""
        return {} if self.bank else {"interpolation_style": {"shared": False}}

    @property
    def tag(self) -> str:
        """The space, which results show: `fisc(pixel)`."""
        return self.encoder

    @property
    def discloses(self) -> str:
        """What the style shows, to whom."""
        if not self.bank:
            return ""
        return (
            f"once, to the server alone: channel means and standard deviations of {self.encoder} features over the "
            "training images; all clients get one style made of all (of two or three clients it is the plain mean, "
            "from which each of two can compute the other's)"
        )

    def check(self, experiment: Experiment) -> None:
        """The space must fit the images, and only vgg has a layer before a ReLU."""
        if self.statistics_layer == "before_relu" and self.encoder != "vgg":
            raise UserError(f"{part_name(self)}.statistics_layer = 'before_relu' is for encoder 'vgg'; "
                            f"encoder {self.encoder!r} has no ReLU")  # fmt: skip
        super().check(experiment)

    def collect(self, round: LocalRound) -> dict[str, np.ndarray]:
        """mean and std of this client's style, float32 [1, C_s]."""
        space, positions = space_of(self, round.device), round.data.training_positions()
        if isinstance(space, Vgg) and self.statistics_layer == "before_relu":
            space = Vgg(space.phi[:-1], space.psi)
        if len(positions) > self.clustered:
            rng = numpy_rng(round.seed, "clustered images", round.client)
            positions = np.sort(rng.choice(positions, self.clustered, replace=False))
            log.warning("client %s: its style is that of %d of its images", round.client, self.clustered)
        means, variances = image_statistics(round, space, positions)
        by_map = self.cluster == "features"
        labels = map_clusters(round, space, positions) if by_map else style_clusters(means, variances)
        mean, variance = pool_clusters(means, variances, labels)
        return style_record(mean[None], variance[None])

    def begin(self, round: LocalRound) -> StepFunction | None:
        """The term, or None when both weights are 0 or there is no style."""
        if not self.bank:
            return None
        record = round.tensors(self.bank, part_name(self))
        if not record:
            log.warning("client %s: no client sent a style; it trains without contrast", round.client)
            return None
        space, target, rng = space_of(self, round.device), (record["mean"], record["std"]), round.rng("negatives")
        correction = int(self.content_variance == "unbiased")

        @torch.no_grad()
        def draw(batch: Batch) -> tuple[Tensor, Tensor]:
            images = style.restyle(space, batch.augmented, target, self.alpha, correction)
            return batch.normalize(images), on_device(rng.random(len(images)), round.device)

        def term(batch: Batch) -> Tensor:
            images, draws = batch.once(self, lambda: draw(batch))
            with round.autocast():
                styled = round.net.features(images).float()
            features = batch.features.float()
            contrast = triplet(features, styled, batch.labels, draws, self.margin)
            squares = mean_squares(features, styled)
            round.tally("triplet_loss", contrast)
            round.tally("norm_loss", squares)
            return self.triplet_weight * contrast + self.norm_weight * squares

        return term
