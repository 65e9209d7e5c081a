"""The convolutional networks that are defined here: two small ones for the embedded images, and U-Net for masks."""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.models.layout import outputs_of

SMALLEST_IMAGE = 16  # two valid 5x5 convolutions and two poolings leave one pixel


class DigitsCNN(nn.Module):
    """Two convolutions and a fully connected layer: the backbone of CSAC's network for Rotated MNIST.

        conv 5x5 (10) - ReLU - max-pool 2 - conv 5x5 (20) - ReLU - max-pool 2 - fc 50 - ReLU

    With `batch_norm` a BatchNorm2d follows each convolution. Images of 28 px give a 20x4x4 map; larger images are
    average-pooled to 4x4, so that the parameters never depend on the image size.

    Source: CSAC, section 4, says only "two convolutional and two fully connected layers", and the second of the latter
    is the head. The widths are those of the common small LeNet (PyTorch's MNIST example).
    """

    widths = (10, 20)
    feature_dim = 50

    def __init__(self, channels: int = 1, batch_norm: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, self.widths[0], 5)
        self.norm1 = nn.BatchNorm2d(self.widths[0]) if batch_norm else nn.Identity()
        self.pool1 = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(*self.widths, 5)
        self.norm2 = nn.BatchNorm2d(self.widths[1]) if batch_norm else nn.Identity()
        self.pool2 = nn.MaxPool2d(2)
        self.resize = nn.AdaptiveAvgPool2d(4)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(self.widths[1] * 4 * 4, self.feature_dim)
        # On CPU convolution and pooling of so few channels are a third faster in this layout.
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, channels, H, W] -> features [B, 50]."""
        # ReLU is monotone: after the pooling it gives the same result with a quarter of the work.
        x = self.relu(self.pool1(self.norm1(self.conv1(x))))
        x = self.relu(self.pool2(self.norm2(self.conv2(x))))
        if x.shape[-2:] != (4, 4):
            x = self.resize(x)
        return self.relu(self.fc(x.flatten(1)))


def block(channels: int, width: int) -> nn.Sequential:
    """Convolution 3x3, batch norm and ReLU."""
    return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())


class SmallCNN(nn.Module):
    """Four convolutions with batch norm, and the mean over the last map: a quarter of a million weights.

        [conv 3x3 - BN - ReLU - max-pool 2] of widths 32, 64, 128, then conv 3x3 (128) - BN - ReLU - global mean

    It is the backbone of `drawings`: on two cores a round of 32-pixel images takes about a second.
    """

    widths = (32, 64, 128, 128)
    feature_dim = widths[-1]

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.block1 = block(channels, self.widths[0])
        self.block2 = block(self.widths[0], self.widths[1])
        self.block3 = block(self.widths[1], self.widths[2])
        self.block4 = block(self.widths[2], self.widths[3])
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, channels, H, W] -> features [B, 128]."""
        x = self.pool(self.block1(x))
        x = self.pool(self.block2(x))
        x = self.pool(self.block3(x))
        return self.block4(x).amax((2, 3))


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
