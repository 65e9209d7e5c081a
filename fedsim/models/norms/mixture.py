"""Normalization by mixtures of instance and global statistics, as a formula and in few operations."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedsim.models.norms.adapter import Adapter
from fedsim.models.norms.moments import batch_moments, differentiable_backward, instance_affine, per_map, prefers_few

SMALLEST_STD = 1e-3


class Mixture:
    """y = gamma (x - mu) / sigma + beta with mu = w mu_i + (1 - w) mu_G and sigma = w sigma_i + (1 - w) sigma_G.

    mu_i and sigma_i = sqrt(v_i + eps) are the mean and standard deviation of each sample and channel. As a function of
    mean and variance [B, C] it is a rule of `instance_affine`.

    reference: mu_G and sigma_G [2, C]; None: those of the batch
    u: w [C]. None: w is the adapter's alpha [B, 1], drawn by z [B]
    has_floor: sigma is at least 1e-3, because extrapolation (u outside [0, 1]) can make it tiny or negative
    alpha: [B], the adapter's last output
    """

    alpha: Tensor | None = None

    def __init__(
        self,
        eps: float,
        reference: Tensor | None,
        u: Tensor | None = None,
        z: Tensor | None = None,
        has_floor: bool = False,
    ) -> None:
        self.eps, self.reference, self.u, self.z, self.has_floor = eps, reference, u, z, has_floor

    def __call__(
        self, mean: Tensor, variance: Tensor, gamma: Tensor, beta: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """a and b [B, C] of `y = a (x - mean) + b`; weights: those of the adapter, where there is no u."""
        std = torch.sqrt(variance + self.eps)
        mean_g, std_g = self.reference_of(mean, variance)
        if self.u is None:
            share = Adapter.alpha(torch.cat([mean - mean_g, std - std_g], dim=1), self.z, *weights)
            self.alpha = share.detach().squeeze(1)
        else:
            share = self.u
        mu = share * mean + (1 - share) * mean_g
        sigma = share * std + (1 - share) * std_g
        slope = gamma / (sigma.clamp_min(SMALLEST_STD) if self.has_floor else sigma)
        return slope, slope * (mean - mu) + beta

    def reference_of(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """mu_G and sigma_G [C], or those of the batch while there are none."""
        if self.reference is not None:
            mean_g, std_g = self.reference.unbind()
            return mean_g, std_g
        mean, variance = batch_moments(mean, variance)
        return mean, torch.sqrt(variance + self.eps)

    def normalized(self, x: Tensor, gamma: Tensor, beta: Tensor, *weights: Tensor) -> Tensor:
        """[B, C, H, W] -> the same shape, in the form that suits the device and what is asked of the gradients."""
        if self.reference is None or not prefers_few(x):
            return instance_affine(x, self, gamma, beta, *weights)[0]
        with torch.autocast(x.device.type, enabled=False):
            full = x if x.dtype == torch.float64 else x.float()
            return _FewOperations.apply(full, self, gamma, beta, *weights).to(x.dtype)


class _FewOperations(torch.autograd.Function):
    """`Mixture` with global statistics in as few operations as there are kernels for.

    The forward pass of x [B, C, H, W], whose maps have N positions; pairs of statistics are [B, 2, C]:

        t = (m, s), s = sqrt(v + eps)                      instance statistics
        q = r + w (t - r) = (mu, sigma)                    r [2, C]: the global ones; w: u [C] or alpha [B, 1]
        a = gamma / sigma,   y = a x + (beta - a mu)        sigma is at least 1e-3, where it has a floor

    The backward pass from g = dL/dy, with sums over the N positions:

        G = sum_p g,   S = sum_p g (x - mu),   D = (G, S / sigma),   dL/d(beta, gamma) = sum_i D
        n = a D = -dL/dq                                    0 for a sigma at its floor
        dL/dalpha = -sum (t - r) n                          over both statistics and all channels
        e = (dL/dt) / N = (h - w n) / N                     h: the adapter's gradient of t - r; without one 0
        k = e_s / s,   dL/dx = a g + k x + (e_m - k m)       [B, C], because dm/dx = 1/N and ds/dx = (x - m) / (s N)

    Second derivatives take the way of the formula.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rule: Mixture, gamma: Tensor, beta: Tensor, *weights: Tensor) -> Tensor:
        ctx.rule, ctx.mixed = rule, _mixed(rule, x, gamma, weights)
        ctx.save_for_backward(x, gamma, beta, *weights)
        slope = ctx.mixed.slope
        offset = torch.addcmul(beta, slope, ctx.mixed.mu, value=-1)
        return torch.addcmul(per_map(offset), x, per_map(slope))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *inputs = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return differentiable_backward(x, ctx.rule, inputs, grad)
        mixed = ctx.mixed
        product = (x - per_map(mixed.mu)).mul_(grad)
        pair = torch.stack((grad.sum(dim=(2, 3)), product.sum(dim=(2, 3)) / mixed.sigma), dim=1)
        of_beta, of_gamma = pair.sum(dim=0) if any(ctx.needs_input_grad[2:4]) else (None, None)
        pull = pair * mixed.slope[:, None]
        if ctx.rule.has_floor:
            pull[:, 1].mul_(mixed.statistics[:, 1] == mixed.sigma)
        of_instances, of_weights = _pulled(ctx.rule, mixed, pull, x.shape[2] * x.shape[3], inputs[2:])
        return _of_maps(x, grad, of_instances, mixed), None, of_gamma, of_beta, *of_weights


class _Mixed(NamedTuple):
    """Values of the forward pass: t, q [B, 2, C]; w; sigma and a [B, C]; what the adapter's gradients need."""

    instances: Tensor
    statistics: Tensor
    share: Tensor
    sigma: Tensor
    slope: Tensor
    passed: tuple[Tensor, ...]

    @property
    def mu(self) -> Tensor:
        """mu [B, C], a view."""
        return self.statistics[:, 0]


def _mixed(rule: Mixture, x: Tensor, gamma: Tensor, weights: Sequence[Tensor]) -> _Mixed:
    """The mixed statistics of the maps [B, C, H, W]; the rule takes over alpha."""
    assert rule.reference is not None
    deviation, mean = torch.std_mean(x, dim=(2, 3), correction=0)
    std = torch.hypot(deviation, torch.tensor(rule.eps**0.5, dtype=x.dtype))
    instances = torch.stack((mean, std), dim=1)
    share = rule.u
    passed: tuple[Tensor, ...] = ()
    if share is None:
        shift = (instances - rule.reference).flatten(1)
        hidden, before = Adapter.passed(shift, rule.z, *weights)
        alpha = before.clamp(0, 1)
        rule.alpha = alpha.squeeze(1)
        share = alpha[:, :, None]
        passed = (shift, hidden, before, alpha)
    statistics = torch.lerp(rule.reference, instances, share)
    sigma = statistics[:, 1]
    if rule.has_floor:
        sigma = sigma.clamp_min(SMALLEST_STD)
    return _Mixed(instances, statistics, share, sigma, gamma / sigma, passed)


def _pulled(
    rule: Mixture, mixed: _Mixed, pull: Tensor, positions: int, weights: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """e = (dL/dt) / N [B, 2, C] from n = -dL/dq, and the gradients of the adapter's weights, where there is one."""
    if rule.u is not None:
        return (mixed.share * pull).mul_(-1 / positions), ()
    assert rule.z is not None
    shift, *passed = mixed.passed
    of_alpha = torch.bmm(pull.flatten(1)[:, None], shift[:, :, None])[:, 0].neg_()
    of_shift, of_weights = Adapter.gradients(of_alpha, shift, rule.z, passed, *weights)
    of_instances = torch.addcmul(of_shift.view_as(pull), mixed.share, pull, value=-1)
    return of_instances.div_(positions), of_weights


def _of_maps(x: Tensor, grad: Tensor, of_instances: Tensor, mixed: _Mixed) -> Tensor:
    """dL/dx [B, C, H, W] from e = (dL/dt) / N."""
    mean, std = mixed.instances.unbind(dim=1)
    of_mean, of_std = of_instances.unbind(dim=1)
    of_square = of_std / std
    offset = torch.addcmul(of_mean, of_square, mean, value=-1)
    by_statistics = torch.addcmul(per_map(offset), x, per_map(of_square))
    return torch.addcmul(by_statistics, grad, per_map(mixed.slope))
