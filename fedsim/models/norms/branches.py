"""The sum of batch norm and instance norm of the same maps, each by PyTorch's own operation."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.models.norms.instance import has_positions
from fedsim.models.norms.moments import BatchNormLayer, starts_slowly

Affine = tuple[Tensor, Tensor]  # weight and bias [C]


def suits_branches(x: Tensor) -> bool:
    """Whether two operations that each read the map stand for one formula of many: for maps with positions on a GPU."""
    return starts_slowly(x) and has_positions(x)


def by_branches(x: Tensor, bn: BatchNormLayer, of_batch: Affine, of_instance: Affine, eps: float) -> Tensor:
    """BN(x) + IN(x) [B, C, H, W], each with the given affine map; the running statistics of `bn` follow in training."""
    return batch_norm(x, bn, *of_batch) + instance_norm(x, *of_instance, eps)


def batch_norm(x: Tensor, bn: BatchNormLayer, weight: Tensor, bias: Tensor) -> Tensor:
    """BN(x) [B, C, H, W] as `bn` computes it, by another affine map.

    It stands for `torch.func.functional_call`, which costs the host as much time as several operations.
    """
    follows = bn.training and bn.track_running_stats
    momentum = bn.momentum
    if follows and bn.num_batches_tracked is not None:
        bn.num_batches_tracked.add_(1)
        momentum = 1.0 / float(bn.num_batches_tracked) if momentum is None else momentum
    of_batch = bn.training or bn.running_mean is None
    mean, variance = (bn.running_mean, bn.running_var) if follows or not bn.training else (None, None)
    return F.batch_norm(x, mean, variance, weight, bias, of_batch, momentum or 0.0, bn.eps)


def instance_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """IN(x) [B, C, H, W] as a group norm of C groups, which does not copy the affine map for every sample.

    On a GPU group norm has no kernel for maps in half precision with an affine map in float32.
    """
    if x.dtype in (torch.float32, torch.float64):
        return F.group_norm(x, len(weight), weight, bias, eps)
    return F.instance_norm(x, weight=weight, bias=bias, eps=eps)
