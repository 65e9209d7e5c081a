"""A network, and digits as four scanners show them, with less and less contrast; the fourth one is unseen."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

DOMAINS = ("scanner-a", "scanner-b", "scanner-c", "scanner-d")
CONTRAST = (1.0, 0.6, 0.35, 0.2)


class Net(nn.Module):
    """A small convolutional network for 16 x 16 pixels; its last layer is linear."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(16)
        self.fc1 = nn.Linear(16 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def load_domain(number, test=False):
    """(image, class) of a domain: a quarter of the digits, by the contrast of its scanner, in 256 levels of grey."""
    digits = load_digits()
    levels = torch.tensor(digits.images[number::4, None] / 16 * 255 * CONTRAST[number], dtype=torch.float32).round()
    images = F.interpolate(levels / 255, scale_factor=2)
    classes = torch.tensor(digits.target[number::4])
    part = slice(0, 90) if test else slice(90, None)
    return TensorDataset(images[part], classes[part])
