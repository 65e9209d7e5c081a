"""A deep bottleneck between the backbone and the classifier, which leaves out domain-specific features."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import nn

from fedsim.common.errors import UserError
from fedsim.models.inserts.base import Insert
from fedsim.models.net import Net

# Widths as fractions of the number of the backbone's features: 8192 -> 3072 -> 2048 in DAL's network for digits.
HIDDEN, WIDTH, LEAST = 3 / 8, 1 / 4, 64


@dataclass(frozen=True)
class Disentangler(Insert):
    """Linear(d, hidden) - BN - ReLU - Linear(hidden, width) - BN - ReLU - Dropout, with `width` output features.

    Source: D_di of FADA (Peng et al., ICLR 2020), with the sizes of the related code of its authors (DAL). A network
    that has a bottleneck already (`model.bottleneck`) keeps it instead, which gives FedAvg's network.

    hidden, width: 0 takes 3/8 and 1/4 of the backbone's features, at least 64
    dropout: the probability of dropout at the output
    """

    hidden: Annotated[int, Field(ge=0)] = 0
    width: Annotated[int, Field(ge=0)] = 0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.5
    order: ClassVar[int] = 1

    def apply(self, net: Net) -> None:
        """Adds the bottleneck and makes a new classifier of its width.

        Raises UserError for a backbone without weights, whose features no training can change.
        """
        if not any(True for _ in net.backbone.parameters()):
            raise UserError("insert Disentangler: the backbone has no weights, so that its features cannot be adapted "
                            "to the unseen domain; use mlp, cnn-1d or a backbone for images")  # fmt: skip
        if not isinstance(net.bottleneck, nn.Identity):
            return
        d, classes = net.feature_dim, net.outputs
        hidden = self.hidden or max(round(HIDDEN * d), LEAST)
        width = self.width or max(round(WIDTH * d), LEAST)
        net.bottleneck = nn.Sequential(
            nn.Linear(d, hidden), nn.BatchNorm1d(hidden), nn.ReLU(),
            nn.Linear(hidden, width), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Dropout(self.dropout),
        )  # fmt: skip
        net.feature_dim = width
        net.head = nn.Linear(width, classes)
