"""Styles as channel statistics: their measurement, pooling, AdaIN, and the feature spaces that need no weight files.

AdaIN is written as one subtraction and one multiply-add per image and channel. Everything that depends on an image's
own statistics is then computed once, and a batch costs one pass over its values.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-5
Statistics = tuple[Tensor, Tensor]  # means and population variances, [B, C] or [C]
Affine = tuple[Tensor, Tensor, Tensor]  # centre, scale and shift, [B, C]: F -> scale (F - centre) + shift
Bands = list[Tensor]  # feature maps [B, c, h, w] whose channels together make up a style


class Space:
    """A feature space Phi with its decoder Psi, between images [B, C, H, W] in [0, 1] and feature maps.

    gain: limits of sigma_s / sigma(F)
    slow: images are transferred once and kept, in place of batch by batch
    """

    gain: tuple[float, float] | None = (0.1, 10.0)
    slow = False

    def encode(self, images: Tensor) -> Bands:
        """The feature maps in which styles are measured."""
        raise NotImplementedError

    def decode(self, bands: Bands, images: Tensor) -> Tensor:
        """Psi, in the size of `images`."""
        raise NotImplementedError


class Pixel(Space):
    """Phi = Psi = identity on the colour channels, C_s = C: statistics transfer in colour space."""

    def encode(self, images: Tensor) -> Bands:
        """The images themselves."""
        return [images]

    def decode(self, bands: Bands, images: Tensor) -> Tensor:
        """The images themselves."""
        return bands[0]


class Haar(Space):
    """Orthonormal Haar transform of J levels per colour channel and its exact inverse, C_s = C (3J + 1).

    A block [a b; c d] gives LL = (a+b+c+d)/2, LH = (a-b+c-d)/2, HL = (a+b-c-d)/2, HH = (a-b-c+d)/2; the next level
    transforms LL. Images are reflect-padded to multiples of 2^J at the right and bottom, and cropped afterwards.
    """

    def __init__(self, levels: int = 3) -> None:
        self.levels = levels

    def encode(self, images: Tensor) -> Bands:
        """[LL of the last level, then LH, HL, HH from coarse to fine]."""
        height, width = images.shape[-2:]
        low = F.pad(images, (0, -width % 2**self.levels, 0, -height % 2**self.levels), mode="reflect")
        details: Bands = []
        for _ in range(self.levels):
            top, bottom = low[..., 0::2, :], low[..., 1::2, :]
            rows = (top + bottom, top - bottom)
            low, lh = _half_sum_difference(rows[0])
            hl, hh = _half_sum_difference(rows[1])
            details = [lh, hl, hh, *details]
        return [low, *details]

    def decode(self, bands: Bands, images: Tensor) -> Tensor:
        """The inverse transform, cropped to the size of `images`."""
        low = bands[0]
        for level in range(self.levels):
            lh, hl, hh = bands[1 + 3 * level : 4 + 3 * level]
            rows = (_interleave(low, lh), _interleave(hl, hh))
            low = torch.stack(((rows[0] + rows[1]) / 2, (rows[0] - rows[1]) / 2), dim=-2).flatten(-3, -2)
        return low[..., : images.shape[-2], : images.shape[-1]]


def _half_sum_difference(x: Tensor) -> tuple[Tensor, Tensor]:
    left, right = x[..., 0::2], x[..., 1::2]
    return (left + right) / 2, (left - right) / 2


def _interleave(total: Tensor, difference: Tensor) -> Tensor:
    """Columns left = total + difference, right = total - difference."""
    return torch.stack((total + difference, total - difference), dim=-1).flatten(-2)


def statistics(bands: Bands, correction: int = 0) -> Statistics:
    """Mean and variance [B, C_s] of each image over all positions; the variance has the divisor N - `correction`."""
    pairs = [torch.var_mean(band, dim=(2, 3), correction=correction) for band in bands]
    return torch.cat([mean for _, mean in pairs], 1), torch.cat([variance for variance, _ in pairs], 1)


def pool(means: Tensor, variances: Tensor, counts: Tensor | None = None) -> Statistics:
    """Mean and variance over all images, from each image's own [n, C_s] and its number of positions N_i [n].

        mu = sum_i N_i mu_i / N,  var = sum_i N_i (var_i + (mu_i - mu)^2) / N   (law of total variance), float64 [C_s]

    The sums are centred, because a sum of squares in float32 would lose a small variance next to a large mean.
    """
    means, variances = means.double(), variances.double()
    counts = torch.ones(len(means), device=means.device) if counts is None else counts
    share = (counts.double() / counts.double().sum())[:, None]
    mean = (share * means).sum(0)
    return mean, (share * (variances + (means - mean).square())).sum(0)


def deviation(variance: Tensor) -> Tensor:
    """sigma = sqrt(var + eps), eps = 1e-5."""
    return (variance + EPS).sqrt()


def adain_affine(
    content: Statistics, style: tuple[Tensor, Tensor], alpha: float = 1.0, gain: tuple[float, float] | None = None
) -> Affine:
    """AdaIN as F -> scale (F - centre) + shift, for each image and channel.

        A = sigma_s (F - mu(F)) / sigma(F) + mu_s,  result alpha A + (1 - alpha) F
        g = sigma_s / sigma(F), limited to `gain`;  scale = alpha g + 1 - alpha,  shift = alpha mu_s + (1 - alpha) mu(F)

    The centre mu(F) is subtracted before the multiplication: on a nearly constant map g is in the thousands, and g F -
    g mu(F) would lose all digits of the difference.

    content: means and variances [.., C_s]
    style: means and standard deviations, broadcast against those of the content
    """
    g = style[1] / deviation(content[1])
    if gain is not None:
        g = g.clamp(*gain)
    return content[0], alpha * g + (1 - alpha), alpha * style[0] + (1 - alpha) * content[0]


def move(features: Tensor, affine: Affine) -> Tensor:
    """scale (F - centre) + shift of one feature map [B, C, h, w]."""
    centre, scale, shift = (values[..., None, None] for values in affine)
    return torch.addcmul(shift, features - centre, scale)


def apply_affine(space: Space, images: Tensor, affine: Affine) -> Tensor:
    """clamp(Psi(scale (Phi(x) - centre) + shift), 0, 1); centre, scale and shift [B, C_s]."""
    return _decoded(space, space.encode(images), images, affine)


def restyle(space: Space, images: Tensor, style: tuple[Tensor, Tensor], alpha: float, correction: int) -> Tensor:
    """clamp(Psi(alpha A + (1 - alpha) F), 0, 1): images in one style (mean and deviation, [1, C_s]), encoded once."""
    bands = space.encode(images)
    return _decoded(space, bands, images, adain_affine(statistics(bands, correction), style, alpha, space.gain))


def _decoded(space: Space, bands: Bands, images: Tensor, affine: Affine) -> Tensor:
    widths = [band.shape[1] for band in bands]
    parts = zip(*(values.split(widths, 1) for values in affine))
    moved = [move(band, part) for band, part in zip(bands, parts, strict=True)]
    return space.decode(moved, images).clamp(0, 1)
