"""BIN: batch-instance normalization with a learned gate per channel."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedsim.models.net import Net
from fedsim.models.norms.base import Norm
from fedsim.models.norms.branches import by_branches, suits_branches
from fedsim.models.norms.moments import BatchNormLayer, Moments, tracked_affine
from fedsim.models.norms.placement import batch_norm_paths, replace
from fedsim.tensors.kinds import Kind


class BINLayer(nn.Module):
    """y = gamma (rho x_B + (1 - rho) x_I) + beta, with rho in [0, 1]^C (Nam and Kim, NeurIPS 2018, eq. 4).

    x_B and x_I are the batch- and instance-normalized input, and share gamma and beta. rho starts at 1, which is plain
    BN; 0 is instance norm. The gate learns ten times faster (`lr_scales`, as in the authors' code), and `after_step()`
    clips it after every optimizer step. A server that goes beyond the clients' mean can make it leave [0, 1]; it then
    acts as at the bound. rho is an ordinary shared weight; `bn.*` belongs to the batch norm.
    """

    tensor_kinds: ClassVar[dict[str, Kind]] = {"rho": Kind.WEIGHT}
    lr_scales: ClassVar[dict[str, float]] = {"rho": 10.0}

    def __init__(self, bn: BatchNormLayer) -> None:
        super().__init__()
        self.bn = bn
        self.rho = nn.Parameter(torch.ones_like(bn.weight))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> the same shape. Raises ValueError for a training batch with one value per channel."""
        bn = self.bn
        if suits_branches(x):
            return self.by_branches(x)

        def rule(mean: Tensor, variance: Tensor, batch: Moments, *own: Tensor) -> tuple[Tensor, Tensor]:
            (batch_mean, batch_variance), (gamma, beta, rho) = batch, own
            rho = within_bounds(rho)
            a_bn = gamma * rho * torch.rsqrt(batch_variance + bn.eps)
            a_in = gamma * (1 - rho) * torch.rsqrt(variance + bn.eps)
            return a_bn + a_in, a_bn * (mean - batch_mean) + beta

        return tracked_affine(x, bn, rule, bn.weight, bn.bias, self.rho)

    def by_branches(self, x: Tensor) -> Tensor:
        """The sum of batch norm and instance norm, whose affine maps have the gate; see `XANLayer.by_branches`."""
        bn, rho = self.bn, within_bounds(self.rho)
        of_batch = bn.weight * rho
        return by_branches(x, bn, (of_batch, bn.bias), (bn.weight - of_batch, torch.zeros_like(bn.bias)), bn.eps)

    @torch.no_grad()
    def after_step(self) -> None:
        """Clips the gate to [0, 1]; to be called after each optimizer step."""
        self.rho.clamp_(0, 1)


def within_bounds(rho: Tensor) -> Tensor:
    """The gate [C] between 0 and 1; its gradient is that of rho, also at the bounds."""
    return rho + (rho.clamp(0, 1) - rho).detach()


@dataclass(frozen=True)
class BIN(Norm):
    """Replaces all batch-norm layers of the backbone by BIN layers.

    Source: batch-instance normalization (Nam and Kim, NeurIPS 2018), equation 4. `norm = "batch_norm"` gives FedAvg's
    network.
    """

    def apply(self, net: Net) -> None:
        """Replaces the layers in place."""
        replace(net, batch_norm_paths(net), BINLayer)
