"""The small convolutional networks of the embedded images: digits and drawings."""

import torch
from torch import nn

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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images [B, channels, H, W] -> features [B, 128]."""
        x = self.pool(self.block1(x))
        x = self.pool(self.block2(x))
        x = self.pool(self.block3(x))
        return self.block4(x).amax((2, 3))
