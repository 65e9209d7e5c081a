"""An attention over the entries of the features, learned on top of a frozen encoder."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fedsim.models.inserts.base import Insert
from fedsim.models.net import Net
from fedsim.parts.facts import Fact


class Attended(nn.Module):
    """f -> a f (entry by entry) with a = softmax(W2 tanh(W1 f + b1) + b2) over the e entries; f [B, e]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        """[B, e] -> [B, e]."""
        return self.second(self.first(features).tanh()).softmax(dim=1) * features


@dataclass(frozen=True)
class FeatureAttention(Insert):
    """a f instead of the features f, with a = softmax(W2 tanh(W1 f + b1) + b2), behind the backbone and a bottleneck.

    2 (e^2 + e) values for features of width e: 525,312 for CLIP ViT-B/32's 512. FedCLIP freezes the rest of the model
    (model.head = "text", model.train = "head"), so that only these are trained and sent; without that the encoder is
    trained too. f is as the encoder gives it, not normalized. With W2 = 0 all entries count alike, and cosines with
    texts are those of zero-shot CLIP.

    Source: Lu et al., FedCLIP, IEEE Data Engineering Bulletin 2023. Here the loss is the cross-entropy over the
    classes' texts. Their trainer contrasts the images of a batch with each other's texts, which is the term
    `in_batch_contrast` (method.add = ["in_batch_contrast"]). Its Adam has the betas .9 and .98 and eps 1e-6;
    train.optimizer = "adam" has PyTorch's, .9, .999 and 1e-8.
    """

    makes_features: ClassVar[bool] = True
    breaks = (Fact.BACKBONE_FEATURES,)
    order: ClassVar[int] = 2

    def apply(self, net: Net) -> None:
        """Put the attention behind what gives the features."""
        attended = Attended(net.feature_dim)
        there = not isinstance(net.bottleneck, nn.Identity)
        net.bottleneck = nn.Sequential(net.bottleneck, attended) if there else attended
