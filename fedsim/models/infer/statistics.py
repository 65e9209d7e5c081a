"""A network in which a rule makes the statistics of BatchNorm2d layers from instance and global statistics."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedsim.models.norms.instance import has_positions, instance_moments, normalize_by
from fedsim.models.norms.placement import replace

# (mu_i, biased var_i, both [B, C]; the layer; positions H * W) -> (mean, std), [B, C] each
StatisticsRule = Callable[[Tensor, Tensor, nn.BatchNorm2d, int], tuple[Tensor, Tensor]]


class RuledNorm(nn.Module):
    """`y = gamma (x - mu) / sigma + beta` with `(mu, sigma) = rule(instance moments, bn, positions)`.

    On one-pixel maps the statistics of one image do not exist: the layer is then the batch norm in eval mode.
    pooled: the rule's statistics are of several images or views, which exist on one-pixel maps too
    """

    def __init__(self, bn: nn.BatchNorm2d, rule: StatisticsRule, pooled: bool = False) -> None:
        super().__init__()
        self.bn, self.rule, self.pooled = bn, rule, pooled

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> the same shape."""
        if not self.pooled and not has_positions(x):
            return self.bn(x)
        mean, variance = instance_moments(x)
        mu, sigma = self.rule(mean, variance, self.bn, x.shape[2] * x.shape[3])
        return normalize_by(x, mu.expand_as(mean), sigma.expand_as(mean), self.bn)


def with_rule(net: nn.Module, rule: StatisticsRule, pooled: bool = False) -> nn.Module:
    """A copy of the network in eval mode in which every BatchNorm2d follows the rule. `net` is not changed.

    Batch norm of vectors (in the bottleneck) is not changed. pooled: see RuledNorm
    """
    net = copy.deepcopy(net).eval()
    paths = [path for path, module in net.named_modules() if isinstance(module, nn.BatchNorm2d)]
    replace(net, paths, lambda bn: RuledNorm(bn, rule, pooled))
    return net
