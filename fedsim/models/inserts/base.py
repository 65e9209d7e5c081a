"""The contract of inserts: modules between the stages of the backbone, or next to the head."""

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fedsim.common.tasks import CLASSIFICATION
from fedsim.models.layout import evaluating, outputs_of
from fedsim.models.net import Net
from fedsim.parts.part import Part


class Insert(Part):
    """Adds modules of its own to the network.

    order: which insert comes first. Small numbers do, and equal ones come in the order of the settings' names, so that
    `a+b` is the network of `b+a`. 0 changes the backbone or stands inside it, and may freeze it, 1 adds a bottleneck,
    2 makes features of those of the bottleneck, 3 stands at the head, 4 looks at the finished network
    second_view: they can act in a second pass only (their attribute `second_view` switches them)
    makes_features: the head sees features that the insert makes from those of the backbone
    reads_map: its features need the feature map of the same pass, so that each pass of the bottleneck needs one of the
    backbone
    counts_clients: `apply` reads `net.clients`, the number of the clients that train
    """

    tasks: ClassVar[tuple[str, ...]] = (CLASSIFICATION.name,)

    order: ClassVar[int] = 3
    second_view: ClassVar[bool] = False
    makes_features: ClassVar[bool] = False
    reads_map: ClassVar[bool] = False
    counts_clients: ClassVar[bool] = False

    def apply(self, net: Net) -> None:
        """Changes `net` in place. Raises UserError when the backbone has no place for the insert.

        torch's global generator is seeded for the initial weights of the insert, equally in every process of a run.
        """
        raise NotImplementedError


PROBE = 64  # pixels of the image that shows how many channels a map has


@torch.no_grad()
def channels_at(net: Net, path: str) -> int:
    """The number of channels of the map that the module at `path` gives, seen with one image of zeros in eval mode."""
    channels = next(module for module in net.backbone.modules() if isinstance(module, nn.Conv2d)).in_channels
    with evaluating(net), outputs_of(net, [path]) as outputs:
        side = net.side or PROBE
        net.pooled(torch.zeros(1, 1 if net.grayscale else channels, side, side))
    return outputs[path].shape[1]


ATTACHED = ("gaussian", "moments")  # what inserts attach to the features that they draw


def attach(features: Tensor, name: Literal["gaussian", "moments"], value: tuple[Tensor, Tensor]) -> None:
    """Attaches to features what they were drawn from."""
    setattr(features, name, value)


def leading(features: Tensor, count: int) -> Tensor:
    """The first rows of features, with what inserts have attached to them."""
    rows = features[:count]
    for name in ATTACHED:
        if hasattr(features, name):
            setattr(rows, name, tuple(value[:count] for value in getattr(features, name)))
    return rows
