"""JiGen's second classifier: the order of an image's tiles."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import nn

from fedsim.models.inserts.base import Insert
from fedsim.models.net import Net


@dataclass(frozen=True)
class JigsawHead(Insert):
    """net.jigsaw: Linear(d, permutations + 1) on the features that the head sees; predictions do not use it.

    JiGen (Carlucci et al., CVPR 2019; baselines.md B.7). It is aggregated like all other tensors.

    permutations: P, how many there are beside the image as it was
    """

    permutations: Annotated[int, Field(ge=1, le=30)] = 30

    def apply(self, net: Net) -> None:
        """Put the classifier beside the head."""
        net.jigsaw = nn.Linear(net.feature_dim, self.permutations + 1)
