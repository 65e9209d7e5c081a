"""Affine normalization per instance, the computation that XAN, DSON and BIN share.

Every layer that mixes instance and batch statistics computes, for sample i and channel c,

    y_icp = a_ic (x_icp - mu_ic) + b_ic,      p over the H*W positions.

(a, b) is a cheap function, the *rule*, of the instance moments and the layer's parameters. Batch moments follow from
instance moments by the law of total variance. One pass over the map thus finds the moments, and another writes the
output. The backward pass costs as much as that of plain batch norm, and autograd sees the map only through [B, C]
tensors.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Moments = tuple[Tensor, Tensor]  # mean and biased variance
Rule = Callable[..., tuple[Tensor, Tensor]]
BatchNormLayer = nn.modules.batchnorm._BatchNorm
_PLAIN: ContextVar[bool] = ContextVar("plain moments", default=False)


@contextmanager
def plain_moments() -> Iterator[None]:
    """Inside the block everything is written in autograd's own operations, which vmap understands."""
    before = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(before)


def per_map(values: Tensor) -> Tensor:
    """[B, C] -> [B, C, 1, 1], one value for each map."""
    return values[:, :, None, None]


def _center(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mu, mu [B, C], biased variance [B, C]); there are two passes, so that no digits cancel."""
    mean = x.mean(dim=(2, 3))
    centered = x - per_map(mean)
    return centered, mean, (centered * centered).mean(dim=(2, 3))


def _plain(x: Tensor, rule: Rule, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same in autograd's own operations, which is slower, but differentiable any number of times."""
    centered, mean, variance = _center(x)
    a, b = rule(mean, variance, *tensors)
    return centered * per_map(a) + per_map(b), mean, variance


class _InstanceAffine(torch.autograd.Function):
    """The forward and backward pass of `_plain`, fused. It keeps the input for the backward pass and no other map."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rule: Rule, *tensors: Tensor) -> tuple[Tensor, ...]:
        centered, mean, variance = _center(x)
        inputs = [tensor.detach().requires_grad_() for tensor in (mean, variance, *tensors)]
        with torch.enable_grad():
            a, b = rule(*inputs)
        ctx.rule, ctx.small = rule, (inputs, (a, b))
        ctx.save_for_backward(x, mean, *tensors)  # batch norm keeps x too; a second map would double the memory
        ctx.mark_non_differentiable(mean, variance)
        return centered.mul_(per_map(a.detach())).add_(per_map(b.detach())), mean, variance

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: second derivatives go through the plain form
            return differentiable_backward(x, ctx.rule, tensors, grad)
        inputs, outputs = ctx.small
        a, centered = outputs[0].detach(), x - per_map(mean)
        grad_b = grad.sum(dim=(2, 3))
        product = grad * centered
        grad_a = product.sum(dim=(2, 3))
        grad_mean, grad_variance, *grad_tensors = torch.autograd.grad(
            outputs, inputs, (grad_a, grad_b), retain_graph=True, materialize_grads=True
        )
        size = centered.shape[2] * centered.shape[3]
        # d mu/dx = 1/N, d var/dx = 2 (x - mu)/N, and x - mu subtracts the mean of a*grad
        slope, offset = grad_variance * (2 / size), (grad_mean - a * grad_b) / size
        grad_x = torch.mul(grad, per_map(a), out=product).add_(centered.mul_(per_map(slope))).add_(per_map(offset))
        return grad_x, None, *grad_tensors


def differentiable_backward(x: Tensor, rule: Rule, tensors: Sequence[Tensor], grad: Tensor) -> tuple:
    """The gradients of x, of nothing (for the rule) and of the tensors, which can be differentiated again.

    x [B, C, H, W] and grad, the gradient of y, are of `instance_affine`. A tensor without gradient gets None.
    """
    y, _, _ = _plain(x, rule, tuple(tensors))
    inputs = [tensor for tensor in (x, *tensors) if tensor.requires_grad]
    gradients = iter(torch.autograd.grad(y, inputs, grad, create_graph=True, materialize_grads=True))
    grad_x, *grad_tensors = [next(gradients) if tensor.requires_grad else None for tensor in (x, *tensors)]
    return grad_x, None, *grad_tensors


def fuses() -> bool:
    """Whether a function with a backward pass of its own may stand for a formula.

    That needs gradients. vmap cannot look into such a function, and the compiler would cut its program there.
    """
    return torch.is_grad_enabled() and not _PLAIN.get() and not torch.compiler.is_compiling()


def starts_slowly(x: Tensor) -> bool:
    """Whether x is on a device on which the number of operations counts more than their size: any but a CPU.

    On a CPU formulas are faster, and their rounding is that of the records.
    """
    return x.device.type != "cpu"


def prefers_few(x: Tensor) -> bool:
    """Whether a fused function of as few operations as possible is used for x."""
    return starts_slowly(x) and fuses()


def instance_affine(x: Tensor, rule: Rule, *tensors: Tensor) -> tuple[Tensor, ...]:
    """(y, mu, variance) of `y = a (x - mu) + b` with `(a, b) = rule(mu, variance, *tensors)`.

    x and y are [B, C, H, W]; mu, variance, a and b are [B, C]. Moments are per sample and channel, and the variance is
    biased; the returned moments carry no gradient. `rule` consists of differentiable operations, and every tensor that
    needs a gradient must be among its arguments. Half-precision maps are computed in float32. `fuses` says where
    autograd's own operations are used.
    """
    with torch.autocast(x.device.type, enabled=False):
        full = x if x.dtype == torch.float64 else x.float()
        form = _InstanceAffine.apply if fuses() else lambda x, rule, *rest: _plain(x, rule, rest)
        y, mean, variance = form(full, rule, *tensors)
    return y.to(x.dtype), mean, variance


def batch_moments(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance [C] of a batch from its instances' moments [B, C] (law of total variance)."""
    return mean.mean(dim=0), variance.mean(dim=0) + mean.var(dim=0, correction=0)


class Tracking(Protocol):
    """A layer with running statistics, as BatchNorm2d has them."""

    training: bool
    track_running_stats: bool
    momentum: float | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None


def running(layer: Tracking) -> tuple[Tensor, Tensor]:
    """The running mean and variance [C] of a layer that tracks them."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return layer.running_mean, layer.running_var


@torch.no_grad()
def update_running(layer: Tracking, mean: Tensor, variance: Tensor, positions: int) -> None:
    """Updates the running statistics as BatchNorm2d does, from instance moments over `positions` pixels.

    The running variance is the unbiased one of all B * positions values; momentum None means a cumulative average.
    Nothing changes while `layer.track_running_stats` is off, as in PyTorch's own layers.
    """
    if not layer.track_running_stats:
        return
    tracked, count = layer.num_batches_tracked, len(mean) * positions
    assert tracked is not None
    mean, variance = batch_moments(mean, variance)
    tracked += 1
    factor = 1.0 / float(tracked) if layer.momentum is None else layer.momentum
    unbiased = variance * (count / (count - 1))
    for old, seen in zip(running(layer), (mean, unbiased)):
        seen = seen.to(old.dtype)
        if _PLAIN.get():
            old.add_(factor * (seen - old))  # vmap has no rule for lerp_
        else:
            old.lerp_(seen, factor)


def tracked_affine(x: Tensor, layer: Tracking, rule: Rule, *tensors: Tensor) -> Tensor:
    """y of `instance_affine` for a layer with running statistics, with `(a, b) = rule(mu, variance, common, *tensors)`.

    common: mean and variance [C] of the batch in training, which the running statistics then follow; else the running
    ones. Raises ValueError for a training batch with one value per channel, which has no variance.
    """
    training, positions = layer.training, x.shape[2] * x.shape[3]
    if training and len(x) * positions < 2:
        raise ValueError(f"training needs more than one value per channel, got {tuple(x.shape)}")

    def whole(mean: Tensor, variance: Tensor, *own: Tensor) -> Moments:
        return rule(mean, variance, batch_moments(mean, variance) if training else running(layer), *own)

    y, mean, variance = instance_affine(x, whole, *tensors)
    if training:
        update_running(layer, mean, variance, positions)
    return y
