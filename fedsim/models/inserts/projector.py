"""A projector next to the classifier, for losses that compare features with projected ones."""

from dataclasses import dataclass

from torch import nn

from fedsim.models.inserts.base import Insert
from fedsim.models.net import Net

NOT_WIDENED = 2048  # ResNet-50's number of features


@dataclass(frozen=True)
class Projector(Insert):
    """net.projector: Linear(d, 2d) - BN - ReLU - Linear(2d, 2d) - BN - ReLU - Linear(2d, d) - BN, next to the head.

    Predictions do not use it. With d = 2048 (ResNet-50) the hidden width is d, as in the authors' code; any other d is
    doubled, so that AlexNet's 4096 features need a projector of 134 million weights. It is aggregated like all other
    tensors, and its batch norm like batch norm.

    Source: q of SelfReg (Kim et al., ICCV 2021).
    """

    def apply(self, net: Net) -> None:
        """Adds the projector next to the head."""
        d = net.feature_dim
        hidden = d if d == NOT_WIDENED else 2 * d
        widths = [(d, hidden), (hidden, hidden), (hidden, d)]
        layers = [[nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()] for a, b in widths]
        net.projector = nn.Sequential(*[layer for block in layers for layer in block][:-1])
