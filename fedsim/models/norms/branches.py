"""The sum of batch norm and instance norm of the same maps, each by PyTorch's own operation."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fedsim.models.norms.instance import has_positions
from fedsim.models.norms.moments import BatchNormLayer, starts_slowly

Affine = tuple[Tensor, Tensor]  # weight and bias [C]


def suits_branches(x: Tensor) -> bool:
    """Whether two operations that each read the map stand for one formula of many: for maps with positions on a GPU."""
    return starts_slowly(x) and has_positions(x)


def by_branches(x: Tensor, bn: BatchNormLayer, of_batch: Affine, of_instance: Affine, eps: float) -> Tensor:
    """BN(x) + IN(x) [B, C, H, W], each with the given affine map; the running statistics of `bn` follow in training."""
    weight, bias = of_batch
    batch = functional_call(bn, {"weight": weight, "bias": bias}, (x,))
    return batch + instance_norm(x, *of_instance, eps)


def instance_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """IN(x) [B, C, H, W] as a group norm of C groups, which does not copy the affine map for every sample.

    On a GPU group norm has no kernel for maps in half precision beside an affine map in float32.
    """
    if x.dtype in (torch.float32, torch.float64):
        return F.group_norm(x, len(weight), weight, bias, eps)
    return F.instance_norm(x, weight=weight, bias=bias, eps=eps)
