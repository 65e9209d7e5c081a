"""L2D's augmenter: random convolutions, with a few learned maps between them, give images new styles."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clients.tools.losses import total

KERNELS = (9, 13, 17, 5)
DROPOUT = 0.2
LEAST_SUM = 0.1  # branch weights are drawn again when their sum is nearer to zero than this


class _Convolution(torch.autograd.Function):
    """`conv2d` with a kernel that is never trained.

    Its gradient is also a convolution, with the mirrored kernel. For so few channels and such large kernels this takes
    a fifth of the time of PyTorch's own transposed convolution.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Tensor, bias: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(kernel)
        ctx.padding = padding
        return F.conv2d(x, kernel, bias, padding=padding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (kernel,) = ctx.saved_tensors
        padding = kernel.shape[-1] - 1 - ctx.padding
        return F.conv2d(gradient, mirrored(kernel), padding=padding), None, None, None


def mirrored(kernel: Tensor) -> Tensor:
    """The kernel of the transposed convolution, as an ordinary one."""
    return kernel.transpose(0, 1).flip(2, 3)


def convolved(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """`conv2d`: [B, C, H, W] -> [B, C, H - k + 1, W - k + 1]."""
    return _Convolution.apply(x, kernel, bias, 0)


def transposed(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """`conv_transpose2d`: [B, C, h, w] -> [B, C, h + k - 1, w + k - 1]."""
    return _Convolution.apply(x, mirrored(kernel), bias, kernel.shape[-1] - 1)


class StyleAugmenter(nn.Module):
    """G(x): the weighted mean of the branches of the noisy input x + 0.01 n nu, nu ~ N(0, I), after a tanh of each.

        colour branch:   1x1 convolution with dropout
        branch of k:     k x k convolution - instance norm - scale * . + shift - k x k transposed convolution

    n, and the scale and shift of each pixel (H - k + 1 by W - k + 1 pixels), are learned. Convolutions are never
    learned. With `fresh` they are drawn at every call, with branch weights N(0, 1) divided by their sum; otherwise they
    are those drawn at the beginning, with equal weights. Kernels that would leave less than 2 x 2 pixels of the image
    are left out (k = 17 at 16 pixels).

    Source: L2D (Wang et al., ICCV 2021), stages 1 and 2. Initial values: n = 0, scale N(1, .1), shift N(0, .1), and
    PyTorch's for convolutions. Draws come from torch's generator.
    """

    def __init__(self, channels: int, height: int, width: int) -> None:
        super().__init__()
        self.channels = channels
        self.kernels = [k for k in KERNELS if min(height, width) - k + 1 >= 2]
        shapes = [(channels, height - k + 1, width - k + 1) for k in self.kernels]
        self.noise = nn.Parameter(torch.zeros(()))
        self.scale = nn.ParameterList(1 + 0.1 * torch.randn(shape) for shape in shapes)
        self.shift = nn.ParameterList(0.1 * torch.randn(shape) for shape in shapes)
        for number, tensor in enumerate(self._draw()):
            self.register_buffer(f"fixed{number}", tensor)

    def forward(self, x: Tensor, fresh: bool) -> Tensor:
        """Images [B, C, H, W] to [B, C, H, W], whose values are not yet limited to a range."""
        drawn = self._draw() if fresh else list(self.buffers())
        tensors = iter([tensor.to(x.device, non_blocking=True) for tensor in drawn])
        x = x + 0.01 * self.noise * torch.randn_like(x)
        branches = [F.dropout(F.conv2d(x, next(tensors), next(tensors)), DROPOUT)]
        for scale, shift in zip(self.scale, self.shift):
            down = F.instance_norm(convolved(x, next(tensors), next(tensors)))
            branches.append(transposed(down * scale + shift, next(tensors), next(tensors)))
        weights = branch_weights(len(branches)) if fresh else [1 / len(branches)] * len(branches)
        return total(weight * branch.tanh() for weight, branch in zip(weights, branches))

    def _draw(self) -> list[Tensor]:
        """Kernels and biases of all branches, uniform within 1 / sqrt(C k^2), as in PyTorch's layers."""
        drawn = []
        for size in [1, *(k for kernel in self.kernels for k in (kernel, kernel))]:
            bound = (self.channels * size * size) ** -0.5
            drawn += [
                torch.empty(self.channels, self.channels, size, size).uniform_(-bound, bound),
                torch.empty(self.channels).uniform_(-bound, bound),
            ]
        return drawn


def branch_weights(count: int) -> list[float]:
    """N(0, 1) divided by their sum; drawn again while the sum is near zero."""
    while True:
        weights = torch.randn(count)
        if abs(float(weights.sum())) >= LEAST_SUM:
            return (weights / weights.sum()).tolist()
