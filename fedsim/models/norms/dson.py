"""DSON: learned mixtures of instance and batch statistics."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedsim.models.net import Net
from fedsim.models.norms.base import Norm
from fedsim.models.norms.moments import Moments, tracked_affine
from fedsim.models.norms.placement import batch_norm_paths, replace
from fedsim.tensors.kinds import Kind


class DSONLayer(nn.Module):
    """Normalization by mixed moments (Seo et al., ECCV 2020).

        mu = w_mu mu_IN + (1 - w_mu) mu_BN,   var = w_v var_IN + (1 - w_v) var_BN,
        y = gamma (x - mu) / sqrt(var + eps) + beta,

    with (w, 1 - w) = softmax(theta). theta starts at (1, 1), so that w = 1/2. With `shared` w_v is w_mu. XAN mixes
    outputs, while DSON mixes moments. Instance and batch variance are both biased; a known reimplementation takes the
    unbiased instance variance, which is H W / (H W - 1) times as large. Running statistics start from the replaced
    layer, and not from 0 as in that reimplementation, and are updated as in BatchNorm2d. Plain BN is the limit theta ->
    (-inf, +inf). All tensors belong to the domain (to its batch norm).
    """

    tensor_kinds: ClassVar[dict[str, Kind]] = {
        "weight": Kind.BN_AFFINE, "bias": Kind.BN_AFFINE, "theta_mean": Kind.BN_AFFINE, "theta_var": Kind.BN_AFFINE,
        "running_mean": Kind.BN_STATISTICS, "running_var": Kind.BN_STATISTICS,
    }  # fmt: skip

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, bn: nn.BatchNorm2d, channelwise: bool = False, shared: bool = False) -> None:
        super().__init__()
        shape = (2, bn.num_features) if channelwise else (2,)
        self.weight, self.bias = bn.weight, bn.bias
        self.theta_mean = nn.Parameter(torch.ones(shape, device=bn.weight.device))
        self.theta_var = None if shared else nn.Parameter(torch.ones(shape, device=bn.weight.device))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(bn, name))
        self.eps, self.momentum, self.track_running_stats = bn.eps, bn.momentum, True

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> the same shape. Raises ValueError for a training batch with one value per channel."""

        def rule(mean: Tensor, variance: Tensor, batch: Moments, *own: Tensor) -> tuple[Tensor, Tensor]:
            (batch_mean, batch_variance), (gamma, beta, theta_mean, theta_var) = batch, own
            w_mean, w_var = torch.softmax(theta_mean, 0)[0], torch.softmax(theta_var, 0)[0]
            mixed_mean = w_mean * mean + (1 - w_mean) * batch_mean
            a = gamma * torch.rsqrt(w_var * variance + (1 - w_var) * batch_variance + self.eps)
            return a, a * (mean - mixed_mean) + beta

        theta_var = self.theta_mean if self.theta_var is None else self.theta_var
        return tracked_affine(x, self, rule, self.weight, self.bias, self.theta_mean, theta_var)


@dataclass(frozen=True)
class DSON(Norm):
    """Replaces all batch-norm layers of the backbone by DSON layers.

    Source: Seo et al., ECCV 2020 (domain-specific optimized normalization). There every source domain has layers of its
    own; here the part `share` says whether a client keeps its own. `norm = "batch_norm"` gives FedAvg's network.

    The default has two mixing weights a layer, as a third party's port has. Of the paper we read the abstract alone,
    which speaks of a weighted average of statistics and does not say whether mean and variance share the weight.

    channelwise: one pair of mixing weights per channel in place of one per layer
    shared: mean and variance are mixed with the same weight
    """

    channelwise: bool = False
    shared: bool = False

    def apply(self, net: Net) -> None:
        """Replaces the layers in place."""
        replace(net, batch_norm_paths(net), lambda bn: DSONLayer(bn, self.channelwise, self.shared))
