"""Convolutions on a processor in bfloat16: taps of a kernel that see nothing but padding get a gradient of 0.

PyTorch 2.15 leaves such gradients as they are in memory on processors that compute bfloat16 themselves (AVX512-BF16),
so that a weight may become 1e30. It happens where a map is smaller than the reach of a kernel: the stride of a ResNet's
last stage at 28 pixels, for one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WidenedConv2d(nn.Conv2d):
    """A convolution of zero-padded maps. Where a tap would see padding alone, the zeros are made a part of the map.

    The output is that of `nn.Conv2d`, of which the pixels beside the original ones are cut away.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] to [B, out, H', W']."""
        sizes = x.shape[2:]
        if not torch.is_grad_enabled() or not any(self.has_blind_tap(axis, size) for axis, size in enumerate(sizes)):
            return super().forward(x)
        (height, width), (rows, columns) = self.margins(), self.stride
        above, beside = height * rows, width * columns
        wide = super().forward(F.pad(x, (beside, beside, above, above)))
        return wide[:, :, height : wide.shape[2] - height, width : wide.shape[3] - width]

    def margins(self) -> tuple[int, int]:
        """The pixels of the output that are added on each side of an axis, enough for the reach of the kernel."""
        reaches = (dilation * (kernel - 1) for kernel, dilation in zip(self.kernel_size, self.dilation, strict=True))
        height, width = (-(-reach // stride) for reach, stride in zip(reaches, self.stride, strict=True))
        return height, width

    def has_blind_tap(self, axis: int, size: int) -> bool:
        """Whether a tap lies on padding wherever the kernel stands on maps of that size along an axis (0 or 1)."""
        kernel, stride, dilation = self.kernel_size[axis], self.stride[axis], self.dilation[axis]
        padding = int(self.padding[axis])
        places = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        for tap in range(kernel):
            pixels = (place * stride - padding + tap * dilation for place in range(places))
            if not any(0 <= pixel < size for pixel in pixels):
                return True
        return False


def widen_convolutions(net: nn.Module) -> None:
    """Makes each zero-padded convolution of a network one that has no blind taps; names and tensors stay the same."""
    for module in net.modules():
        if type(module) is nn.Conv2d and module.padding_mode == "zeros" and not isinstance(module.padding, str):
            module.__class__ = WidenedConv2d
