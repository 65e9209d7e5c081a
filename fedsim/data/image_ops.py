"""Image operations on batches with one parameter per image: pure functions of tensors, on the tensor's device.

x is float [B,C,H,W] in [0,1]; a factor is [B,1,1,1]. Formulas are those of torchvision.transforms.v2.functional.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def resized_crop(x: Tensor, boxes: Tensor, flipped: Tensor) -> Tensor:
    """The boxes [B,4] scaled to full size, bilinear without antialias, and mirrored where `flipped` [B] says so."""
    top, left, height, width = boxes[:, :, None].unbind(1)
    rows = _sample_at(top, height, x.shape[-2])
    columns = _sample_at(left, width, x.shape[-1])
    columns = torch.where(flipped[:, None], columns.flip(1), columns)
    rows = rows.to(x, non_blocking=True)
    columns = columns.to(x, non_blocking=True)
    shape = (len(x), rows.shape[1], columns.shape[1])
    across = columns[:, None, :].expand(shape)
    down = rows[:, :, None].expand(shape)
    grid = torch.stack([across, down], -1)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _sample_at(start: Tensor, length: Tensor, size: int) -> Tensor:
    """Coordinates in [-1,1] at which `size` output pixels read the source range [start, start+length), [B,size]."""
    steps = torch.arange(size) + 0.5
    pixel = steps * (length / size) - 0.5
    pixel = torch.minimum(pixel.clamp_(min=0), length - 1) + start  # clamped to the crop, as interpolating it would be
    return (2 * pixel + 1) / size - 1


def grey(x: Tensor) -> Tensor:
    """Luma [B,1,H,W] of RGB [B,3,H,W] (ITU-R 601, rounded as torchvision does)."""
    red, green, blue = x.split(1, dim=1)
    luma = red * 0.2989
    return luma.add_(green, alpha=0.587).add_(blue, alpha=0.114)


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    """clamp(factor x)."""
    return (x * factor).clamp_(0, 1)


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    """clamp(m + factor (x - m)) with m the mean luma of the image."""
    mean = grey(x).mean((1, 2, 3), keepdim=True)
    return torch.lerp(mean.expand_as(x), x, factor).clamp_(0, 1)


def saturation(x: Tensor, factor: Tensor) -> Tensor:
    """clamp(g + factor (x - g)) with g the luma of the pixel."""
    luma = grey(x)
    return torch.lerp(luma.expand_as(x), x, factor).clamp_(0, 1)


def hue(x: Tensor, shift: Tensor) -> Tensor:
    """The hue turned by `shift` in [-1/2, 1/2] of the circle; value and chroma do not change.

        channel = v - c clamp(2 - |((h + n) mod 6) - 2|, 0, 1), n = 5, 3, 1 for red, green, blue; v = max, c = max - min

    The modulo is computed as the distance to the nearest multiple of six, which needs no division by c per channel.
    """
    r, g, b = x.unbind(1)
    value = torch.maximum(torch.maximum(r, g), b)
    chroma = value - torch.minimum(torch.minimum(r, g), b)
    inverse = chroma.clamp_min(1e-8).reciprocal_()
    green_or_blue = torch.where(value == g, (b - r).mul_(inverse).add_(2), (r - g).mul_(inverse).add_(4))
    sextant = torch.where(value == r, (g - b).mul_(inverse), green_or_blue).add_(6 * shift[:, 0])
    turned = torch.empty_like(x)
    for channel, n in enumerate((5, 3, 1)):
        distance = sextant + (n - 2)
        distance = distance.sub_((distance / 6).round_(), alpha=6).abs_()
        share = distance.neg_().add_(2).clamp_(0, 1)
        torch.sub(value, share.mul_(chroma), out=turned[:, channel])
    return turned
