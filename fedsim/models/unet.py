"""U-Net: features of every pixel, from coarse context and fine detail."""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.models.layout import outputs_of


class DoubleConv(nn.Sequential):
    """3x3 convolution - batch norm - ReLU, twice."""

    def __init__(self, inputs: int, outputs: int) -> None:
        layers: list[nn.Module] = []
        for width in (inputs, outputs):
            layers += [nn.Conv2d(width, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        super().__init__(*layers)


class Up(nn.Module):
    """The deeper map at twice its size (bilinear) next to the map of the same level, then a double convolution."""

    def __init__(self, deep: int, skip: int, outputs: int) -> None:
        super().__init__()
        self.conv = DoubleConv(deep + skip, outputs)

    def forward(self, deep: Tensor, skip: Tensor) -> Tensor:
        """[B, deep, h, w], [B, skip, H, W] -> [B, outputs, H, W]."""
        deep = F.interpolate(deep, skip.shape[-2:], mode="bilinear", align_corners=False)
        return self.conv(torch.cat([skip, deep], dim=1))


class UNet(nn.Module):
    """An encoder of `depth` halvings with widths n, 2n, 4n, ..., and a decoder with 2n channels at its end.

    Source: Ronneberger et al., MICCAI 2015, with padded convolutions, bilinear enlargement and batch norm. ELCFS has n
    = 16, four halvings, and instance norm without affine parameters and statistics. Here it is batch norm, so that
    parts for batch norm can act on it (`model.norm` parts replace it). Maps of odd size are accepted.
    """

    def __init__(self, channels: int = 3, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.pool = nn.MaxPool2d(2)
        self.encoder = nn.ModuleList(DoubleConv(a, b) for a, b in zip([channels, *widths], widths))
        outputs = [max(one, 2 * width) for one in widths[:-1]]
        self.decoder = nn.ModuleList(
            Up(deep, skip, out) for deep, skip, out in reversed(list(zip([*outputs[1:], widths[-1]], widths, outputs)))
        )
        self.feature_dim = outputs[0]

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, channels, H, W] -> features [B, 2n, H, W]."""
        maps = []
        for number, stage in enumerate(self.encoder):
            x = stage(self.pool(x) if number else x)
            maps.append(x)
        x = maps.pop()
        for stage in self.decoder:
            x = stage(x, maps.pop())
        return x


class EncodedUNet(nn.Module):
    """A classifier's backbone as the encoder of a U-Net: its maps at 1/2, 1/4, ... of the image's side, and the image.

    encoder: the backbone, whose classifier is taken off. paths: modules whose outputs are the maps, shallow to deep.
    channels: of these maps. The decoder doubles step by step up to the image's own size; widths are 16 times 2 to the
    number of halvings, at least 32 and at most 256.
    """

    feature_dim: ClassVar[int] = 32

    def __init__(self, encoder: nn.Module, paths: Sequence[str], channels: Sequence[int]) -> None:
        super().__init__()
        self.encoder, self.paths = encoder, tuple(paths)
        outputs = [min(256, max(self.feature_dim, 16 * 2**level)) for level in range(len(paths))]
        skips = [3, *channels[:-1]]
        deep = [*outputs[1:], channels[-1]]
        self.decoder = nn.ModuleList(Up(*each) for each in reversed(list(zip(deep, skips, outputs))))

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, 3, H, W] -> features [B, feature_dim, H, W]."""
        with outputs_of(self.encoder, self.paths) as maps:
            self.encoder(x)
        skips = [x, *(maps[path] for path in self.paths)]
        deep = skips.pop()
        for stage in self.decoder:
            deep = stage(deep, skips.pop())
        return deep
