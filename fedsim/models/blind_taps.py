"""Convolutions on a processor in bfloat16: taps of a kernel that see nothing but padding get a gradient of 0.

PyTorch 2.15 leaves such gradients as they are in memory on processors that compute bfloat16 themselves (AVX512-BF16),
so that a weight may become 1e30. It happens where a map is smaller than the reach of a kernel: the stride of a ResNet's
last stage at 28 pixels, for one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd


class Widened(_ConvNd):
    """A convolution of zero-padded maps. Where a tap would see padding alone, the zeros are made a part of the map.

    The output is that of the class of PyTorch, of which the places beside the original ones are cut away.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, *sizes] to [B, out, *sizes of the output]; also without B."""
        axes = len(self.kernel_size)
        sizes = x.shape[-axes:]
        if not torch.is_grad_enabled() or not any(self.has_blind_tap(axis, size) for axis, size in enumerate(sizes)):
            return super().forward(x)
        margins = self.margins()
        pads: list[int] = []
        for margin, stride in zip(reversed(margins), reversed(self.stride), strict=True):  # F.pad begins at the end
            pads += [margin * stride] * 2
        wide = super().forward(F.pad(x, pads))
        for axis, margin in zip(range(-axes, 0), margins, strict=True):
            wide = wide.narrow(axis, margin, wide.shape[axis] - 2 * margin)
        return wide

    def margins(self) -> list[int]:
        """The places of the output that are added on each side of an axis, enough for the reach of the kernel."""
        reaches = [dilation * (kernel - 1) for kernel, dilation in zip(self.kernel_size, self.dilation, strict=True)]
        return [-(-reach // stride) for reach, stride in zip(reaches, self.stride, strict=True)]

    def has_blind_tap(self, axis: int, size: int) -> bool:
        """Whether a tap lies on padding wherever the kernel stands on maps of that size along an axis (0, 1 or 2)."""
        kernel, stride, dilation = self.kernel_size[axis], self.stride[axis], self.dilation[axis]
        padding = int(self.padding[axis])
        places = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        for tap in range(kernel):
            pixels = (place * stride - padding + tap * dilation for place in range(places))
            if not any(0 <= pixel < size for pixel in pixels):
                return True
        return False


class WidenedConv1d(Widened, nn.Conv1d):
    """Of signals."""


class WidenedConv2d(Widened, nn.Conv2d):
    """Of maps."""


class WidenedConv3d(Widened, nn.Conv3d):
    """Of volumes."""


KINDS: dict[type[nn.Module], type[Widened]] = {
    nn.Conv1d: WidenedConv1d,
    nn.Conv2d: WidenedConv2d,
    nn.Conv3d: WidenedConv3d,
}


def widen_convolutions(net: nn.Module) -> None:
    """Makes each zero-padded convolution of a network one that has no blind taps; names and tensors stay the same."""
    for module in net.modules():
        kind = KINDS.get(type(module))
        if kind is not None and module.padding_mode == "zeros" and not isinstance(module.padding, str):
            module.__class__ = kind
