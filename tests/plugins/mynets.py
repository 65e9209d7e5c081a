"""A backbone as a user may write it in a file of its own, worked through in docs/own-model.md."""

from torch import nn

from fedsim.models.layout import Backbone, Layout


def make(image_size: int, channels: int) -> nn.Module:
    """A network that gives 32 features for each image."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


# Stages say which layers belong together: methods that replace normalization layers or mix feature maps name them by
# number. Levels are the feature maps that CSAC compares, from shallow to deep.
layout = Layout(feature_dim=32, levels=("2", "6"), stages={1: ("0", "1", "2"), 2: ("4", "5", "6")})
small = Backbone(make, layout, own_channels=True)
