"""JiGen's second classifier, which predicts the order of an image's tiles."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import nn

from fedsim.models.inserts.base import Insert
from fedsim.models.net import Net


@dataclass(frozen=True)
class JigsawHead(Insert):
    """net.jigsaw: Linear(d, permutations + 1) on the features that the head sees. Predictions do not use it.

    Source: JiGen (Carlucci et al., CVPR 2019). It is aggregated like all other tensors.

    permutations: P, the number of permutations besides the original order
    """

    permutations: Annotated[int, Field(ge=1, le=30)] = 30

    def apply(self, net: Net) -> None:
        """Adds the classifier next to the head."""
        net.jigsaw = nn.Linear(net.feature_dim, self.permutations + 1)
