"""Instance statistics and affine maps per instance, without gradients, for the inference rules on batch norm."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.models.norms.moments import BatchNormLayer

SMALL_MAP = 64  # positions
CANCELLED = 0.02  # a variance below this share of E[x^2] has lost two of its seven digits


def has_positions(x: Tensor) -> bool:
    """Whether instance statistics of x exist: this needs a map [B, C, H, W] of more than one position."""
    return x.dim() == 4 and x.shape[2] * x.shape[3] > 1


def instance_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and biased variance [B, C] of each sample's maps [B, C, H, W], in float32 or more; no gradient."""
    x = x if x.dtype == torch.float64 else x.float()
    if (
        x.device.type != "cpu" or torch.compiler.is_exporting()
    ):  # an exported file must not depend on the values of one batch
        variance, mean = torch.var_mean(x, dim=(2, 3), correction=0)
        return mean, variance
    with torch.autocast(x.device.type, enabled=False):  # the product below must stay in float32
        mean, variance = _moments(x.contiguous().view(-1, x.shape[2] * x.shape[3]))
    return mean.view(x.shape[:2]), variance.view(x.shape[:2])


def _moments(maps: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and biased variance of each row; on the CPU this is 10 to 20 times faster than var_mean."""
    size = maps.shape[1]
    if size <= SMALL_MAP:  # sums of short rows are fastest as a product with ones
        ones = maps.new_ones(size)
        mean = (maps @ ones) / size
        return mean, ((maps - mean[:, None]).square_() @ ones) / size
    # E[x^2] - mean^2 reads a map twice and writes none. In rows where its digits cancel, the centred form is used
    # instead.
    mean = maps.sum(dim=1) / size
    square = torch.linalg.vector_norm(maps, dim=1).square() / size
    variance = square - mean.square()
    doubtful = (variance < CANCELLED * square).nonzero().squeeze(1)
    if len(doubtful):
        variance[doubtful] = (maps[doubtful] - mean[doubtful, None]).square().mean(dim=1)
    return mean, variance


def affine_map(x: Tensor, mean: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`y = a (x - mean) + b` with mean, a and b [B, C] over maps [B, C, H, W]; no gradient."""
    with torch.autocast(x.device.type, enabled=False):
        full = x if x.dtype == torch.float64 else x.float()
        if x.device.type == "cpu" and full.is_contiguous():
            # Batch norm in eval mode over B * C channels: one pass over the map, where broadcasting takes two or three.
            flat = full.view(1, -1, *full.shape[2:])
            mean, a, b = mean.reshape(-1), a.reshape(-1), b.reshape(-1)
            return F.batch_norm(flat, mean, torch.ones_like(mean), a, b, eps=0.0).view_as(x).to(x.dtype)
        return torch.addcmul((b - a * mean)[:, :, None, None], full, a[:, :, None, None]).to(x.dtype)


def normalize_by(x: Tensor, mean: Tensor, std: Tensor, bn: BatchNormLayer) -> Tensor:
    """`gamma (x - mean) / std + beta` with mean and std [B, C] and the affine of `bn`; no gradient."""
    a = bn.weight / std
    return affine_map(x, mean, a, bn.bias.expand_as(a))
