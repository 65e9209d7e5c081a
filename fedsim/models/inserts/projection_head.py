"""A projection head between the backbone and the classifier."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import nn

from fedsim.models.inserts.base import Insert
from fedsim.models.net import Net
from fedsim.settings.effect import Only, Trait


@dataclass(frozen=True)
class ProjectionHead(Insert):
    """Linear(d, d) - ReLU - Linear(d, width) after the backbone; its output is the input of the classifier.

    Source: MOON's network (Li et al., CVPR 2021). A network that has a bottleneck already keeps it instead, unless
    `always` is set; then the projection head comes after the bottleneck. `inserts = "none"` gives FedAvg's network.

    width: the number of features that the classifier sees
    always: add it to a network with a bottleneck too
    """

    width: Annotated[int, Field(ge=1), Only(always=True), Only(Trait.NO_BOTTLENECK)] = 256
    always: Annotated[bool, Only(Trait.BOTTLENECK)] = False
    order: ClassVar[int] = 1

    def apply(self, net: Net) -> None:
        """Adds the projection head and makes a new classifier of its width."""
        if not isinstance(net.bottleneck, nn.Identity) and not self.always:
            return
        d, classes = net.feature_dim, net.outputs
        head = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, self.width))
        net.bottleneck = head if isinstance(net.bottleneck, nn.Identity) else nn.Sequential(net.bottleneck, head)
        net.feature_dim = self.width
        net.head = nn.Linear(self.width, classes)
