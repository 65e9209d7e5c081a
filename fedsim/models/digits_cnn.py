"""The small convolutional network of the digit benchmarks."""

import torch
from torch import nn

SMALLEST_IMAGE = 16  # two valid 5x5 convolutions and two poolings leave one pixel


class DigitsCNN(nn.Module):
    """Two convolutions and a fully connected layer: the backbone of CSAC's Rotated-MNIST network.

    conv 5x5 (32) - ReLU - max-pool 2 - conv 5x5 (48) - ReLU - max-pool 2 - fc 100 - ReLU; with `batch_norm` a
    BatchNorm2d follows each convolution. Widths are those of the customary MNIST network of domain adaptation; CSAC
    (section 4 of the paper) says only "two convolutional and two fully connected layers", the second being the head.
    28 px give a 48x4x4 map; larger images are average-pooled to 4x4, so the parameters never depend on the image size.
    """

    feature_dim = 100

    def __init__(self, channels: int = 1, batch_norm: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 32, 5)
        self.norm1 = nn.BatchNorm2d(32) if batch_norm else nn.Identity()
        self.pool1 = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(32, 48, 5)
        self.norm2 = nn.BatchNorm2d(48) if batch_norm else nn.Identity()
        self.pool2 = nn.MaxPool2d(2)
        self.resize = nn.AdaptiveAvgPool2d(4)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(48 * 4 * 4, self.feature_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images [B, channels, H, W] -> features [B, 100]."""
        x = self.pool1(self.relu(self.norm1(self.conv1(x))))
        x = self.pool2(self.relu(self.norm2(self.conv2(x))))
        if x.shape[-2:] != (4, 4):
            x = self.resize(x)
        return self.relu(self.fc(x.flatten(1)))
