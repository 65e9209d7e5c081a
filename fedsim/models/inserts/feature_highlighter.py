"""Attention over the positions of the last map, towards what samples of one class have in common."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.common.errors import UserError
from fedsim.models.inserts.base import Insert, channels_at
from fedsim.models.net import Net
from fedsim.parts.facts import Fact

WIDTH = 30  # channels of queries, of keys and of values

Partners = Callable[[Tensor], Tensor]  # mean queries [N, 30] -> those of every sample's partner


def attention(query: Tensor, keys: Tensor) -> Tensor:
    """a [N, P] = softmax over the positions s of r(s), where r(s) = (1/P) sum_p q(p) . k(s).

    query: the mean of q over its positions [N, 30], to which the sum reduces. keys: k [N, 30, P]
    """
    return torch.bmm(query[:, None], keys)[:, 0].softmax(dim=1)


class Highlighter(nn.Module):
    """Appends the attended features to those of the network: f [B, F] -> [f; sum_s a(s) x(s)] [B, F + D].

    x [B, D, H, W] is the last map of the same pass, which a hook keeps until then. Queries and keys are a 1x1
    convolution of it, normalized over their 30 channels at every position. `partners` gives every sample the query of
    another one, with which its own is averaged; None: its own.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, 3 * WIDTH, 1)
        self.partners: Partners | None = None
        self.map: Tensor | None = None

    def keep(self, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        """A forward hook of the last stage."""
        self.map = output

    def forward(self, features: Tensor) -> Tensor:
        """[B, F] -> [B, F + D]."""
        x, self.map = self.map, None
        assert x is not None  # the last stage has just given its map
        assert self.project.bias is not None
        weight, bias = self.project.weight[: 2 * WIDTH], self.project.bias[: 2 * WIDTH]
        query, keys = F.conv2d(x, weight, bias).float().flatten(2).chunk(2, dim=1)
        query, keys = F.normalize(query, dim=1).mean(dim=2), F.normalize(keys, dim=1)
        if self.partners is not None:
            query = (self.partners(query) + query) / 2
        attended = torch.bmm(x.flatten(2).float(), attention(query, keys)[:, :, None])[:, :, 0]
        return torch.cat([features, attended.to(features.dtype)], dim=1)

    @contextmanager
    def paired(self, partners: Partners) -> Iterator[None]:
        """Inside the block a sample's partner is what `partners` says."""
        self.partners = partners
        try:
            yield
        finally:
            self.partners = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the network begins without the map of a pass that was never finished, which has a graph."""
        return {**self.__dict__, "map": None}


@dataclass(frozen=True)
class FeatureHighlighter(Insert):
    """Features [f; sum_s a(s) x(s)]: behind what the head saw before, the last map x [D, h, w], weighted by position.

        a = softmax_s r(s),   r(s) = (1 / (h w)) sum_p q'(p) . k(s),   q' = (q + q_j)/2,  j the partner

    q and k are a 1x1 convolution of x to 30 channels each, normalized to length 1 at every position; q' is not
    normalized again and r has no temperature. In a step that says so (`enlarged_batch`) the partner is the next sample
    of the same class in the batch; everywhere else, and when images are predicted, it is the sample itself, so that no
    image depends on another. f are the means (1 / (h w)) sum_s x(s) on ResNets and DenseNets, which makes 2 D features;
    where a backbone goes on after its last map (digits-cnn-bn) or has a bottleneck, f is what comes of that.

    The classifier is made anew for the width, and 90 D + 90 weights are added to what is sent, 46,170 on ResNet-18: as
    in the released code the convolution also gives 30 channels of values, which nothing uses.

    Source: StableFDG (Park et al., NeurIPS 2023), attention-based feature highlighter. The released code divides by 49
    whatever the size of the map; the formula's 1 / (h w) is used here. Without this insert the network is FedAvg's.
    """

    assumes = (Fact.IMAGES,)
    makes_features: ClassVar[bool] = True
    breaks = (Fact.BACKBONE_FEATURES,)
    reads_map: ClassVar[bool] = True
    side_by_side: ClassVar[bool] = False  # the map of a pass is kept until its features are there
    order: ClassVar[int] = 2

    def apply(self, net: Net) -> None:
        """Appends the features and makes a classifier of their width. Raises UserError for a backbone without maps."""
        if not net.stages:
            raise UserError("insert FeatureHighlighter: the backbone has no stages, and so no last map; use a ResNet, "
                            "densenet121 or digits-cnn-bn")  # fmt: skip
        path = net.stages[max(net.stages)][-1]
        channels = channels_at(net, path)
        highlighter = Highlighter(channels)
        net.get_submodule(path).register_forward_hook(highlighter.keep)
        alone = isinstance(net.bottleneck, nn.Identity)
        net.bottleneck = highlighter if alone else nn.Sequential(net.bottleneck, highlighter)
        net.feature_dim += channels
        net.head = nn.Linear(net.feature_dim, net.outputs)
