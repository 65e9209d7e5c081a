"""The operations of AutoAugment's family on batches: each image has its own operation and its own magnitude.

x is float [B,C,H,W] in [0,1], a magnitude is [B,1,1,1]. The formulas are those of torchvision.transforms.v2.functional
for float images (nearest interpolation, black where no pixel comes from). The code is our own because torchvision
applies one operation with one magnitude to a whole batch; image by image it takes several times as long, and
augmentation runs in every step.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.data import image_ops

GEOMETRIC = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
COLOUR = ("brightness", "color", "contrast", "sharpness")  # a magnitude m means the factor 1 + m
SIGNED = frozenset((*GEOMETRIC, *COLOUR))


def apply_operations(x: Tensor, names: list[str], chosen: Tensor, magnitudes: Tensor) -> Tensor:
    """Each image after its operation `names[chosen]`, by its magnitude; chosen int64 [B] and magnitudes [B] on the CPU.

    The units: shear as the tangent, translation in whole pixels, rotation in degrees, colour operations as factor - 1,
    posterize in bits, solarize as the threshold. identity, auto_contrast and equalize have none.
    """
    geometric = torch.tensor([name in GEOMETRIC for name in names])[chosen]
    if geometric.any():
        moves = [inverse_move(names[index], value, *x.shape[-2:]) for index, value in
                 zip(chosen[geometric].tolist(), magnitudes[geometric].tolist())]  # fmt: skip
        x = _replaced(x, geometric, lambda some: warped(some, torch.tensor(moves)))
    for index in chosen[~geometric].unique().tolist():
        operation = OPERATIONS[names[index]]
        if operation is not None:
            selected = chosen == index
            amount = magnitudes[selected].to(x, non_blocking=True)[:, None, None, None]
            x = _replaced(x, selected, operation, amount)
    return x


def _replaced(x: Tensor, chosen: Tensor, operation: Callable[..., Tensor], *more: Tensor) -> Tensor:
    """x with `operation` applied to the images that `chosen` [B] marks."""
    index = chosen.nonzero()[:, 0].to(x.device, non_blocking=True)
    if len(index) == len(x):
        return operation(x, *more)
    return x.index_copy(0, index, operation(x.index_select(0, index), *more))


# --- geometry ---------------------------------------------------------------------------------------------------------


def inverse_move(name: str, value: float, height: int, width: int) -> list[float]:
    """(a, b, c, d, e, f): the pixel (u, v), relative to the centre, comes from (a u + b v + c, d u + e v + f).

    Shears leave the upper (left) border in place, as in torchvision's RandAugment.
    """
    if name == "rotate":
        cos, sin = math.cos(math.radians(value)), math.sin(math.radians(value))
        return [cos, -sin, 0, sin, cos, 0]
    if name == "shear_x":
        return [1, value, value * height / 2, 0, 1, 0]
    if name == "shear_y":
        return [1, 0, 0, value, 1, value * width / 2]
    return [1, 0, -int(value), 0, 1, 0] if name == "translate_x" else [1, 0, 0, 0, 1, -int(value)]


def warped(x: Tensor, moves: Tensor) -> Tensor:
    """Images [B,C,H,W] moved by inverse maps [B,6], with the nearest pixel, and black outside."""
    height, width = x.shape[-2:]
    v, u = torch.meshgrid(_from_centre(height), _from_centre(width), indexing="ij")
    base = torch.stack([u, v, torch.ones_like(u)], -1).reshape(1, -1, 3)
    half = torch.tensor([width / 2, height / 2])
    theta = moves.reshape(-1, 2, 3).to(torch.float32).transpose(1, 2) / half
    grid = torch.matmul(base, theta).reshape(len(x), height, width, 2).to(x.device, non_blocking=True)
    return F.grid_sample(x, grid, mode="nearest", padding_mode="zeros", align_corners=False)


def _from_centre(size: int) -> Tensor:
    return torch.linspace((1 - size) / 2, (size - 1) / 2, size)


# --- colours ----------------------------------------------------------------------------------------------------------


def brightness(x: Tensor, m: Tensor) -> Tensor:
    """clamp((1 + m) x)."""
    return image_ops.brightness(x, 1 + m)


def color(x: Tensor, m: Tensor) -> Tensor:
    """Saturation multiplied by 1 + m; grey images do not change."""
    return image_ops.saturation(x, 1 + m) if x.shape[1] == 3 else x


def contrast(x: Tensor, m: Tensor) -> Tensor:
    """clamp(mean luma + (1 + m) (x - mean luma))."""
    if x.shape[1] == 3:
        return image_ops.contrast(x, 1 + m)
    return torch.lerp(x.mean((1, 2, 3), keepdim=True), x, 1 + m).clamp_(0, 1)


def sharpness(x: Tensor, m: Tensor) -> Tensor:
    """clamp(blur + (1 + m) (x - blur)). The blur has weights 1 around 5 (over 13), inside the border of one pixel."""
    if min(x.shape[-2:]) <= 2:
        return x
    around = F.avg_pool2d(x, 3, stride=1) * 9
    blurred = x.clone()
    blurred[..., 1:-1, 1:-1] = (around + 4 * x[..., 1:-1, 1:-1]) / 13
    return torch.lerp(blurred, x, 1 + m).clamp_(0, 1)


def posterize(x: Tensor, bits: Tensor) -> Tensor:
    """2^bits levels."""
    levels = torch.exp2(bits)
    return torch.minimum((x * levels).floor_(), levels - 1).div_(levels)


def solarize(x: Tensor, threshold: Tensor) -> Tensor:
    """1 - x for values from the threshold up."""
    return torch.where(x >= threshold, 1 - x, x)


def auto_contrast(x: Tensor, _: Tensor) -> Tensor:
    """Each channel of each image stretched to [0, 1]; a constant channel does not change."""
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    flat = low == high
    low = torch.where(flat, 0.0, low)
    return ((x - low) / torch.where(flat, 1.0, high - low)).clamp_(0, 1)


def equalize(x: Tensor, _: Tensor) -> Tensor:
    """Each channel with an even histogram of 256 values, as Pillow computes it."""
    planes = (x * 255.999).clamp(0, 255).to(torch.int64).flatten(0, 1).flatten(1)
    histogram = planes.new_zeros(len(planes), 256).scatter_add_(1, planes, torch.ones_like(planes))
    total = histogram.cumsum(1)
    last = total.argmax(1, keepdim=True)  # the largest value that occurs
    step = (planes.shape[1] - histogram.gather(1, last)).div(255, rounding_mode="floor")
    table = (total + step // 2).div(step.clamp_min(1), rounding_mode="floor")
    table = torch.cat([table.new_zeros(len(table), 1), table[:, :-1]], 1).clamp_(0, 255)
    equal = torch.where(step > 0, table.gather(1, planes), planes)
    return equal.reshape(x.shape).to(x.dtype) / 255


OPERATIONS = {
    "identity": None, "brightness": brightness, "color": color, "contrast": contrast, "sharpness": sharpness,
    "posterize": posterize, "solarize": solarize, "auto_contrast": auto_contrast, "equalize": equalize,
}  # fmt: skip
