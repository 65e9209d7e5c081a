"""The structure that all models share: backbone, optional bottleneck, linear head."""

from collections.abc import Mapping

import torch
from torch import nn

from fedsim.models.tasks import CLASSIFIES, TaskRules


class Net(nn.Module):
    """The classifier `head(bottleneck(backbone(x)))`.

    backbone: images [B, channels, H, W] to pooled features [B, D], or for a segmentation to features of every pixel [B,
    D, H, W]
    bottleneck: the identity, or Linear(D, width) - BatchNorm1d - ReLU (the network of CSAC and FedIG)
    head: the linear classifier (or 1x1 convolution), the only module that depends on the classes
    outputs: the number of logits
    feature_dim: the size of `features(x)`
    levels: the paths of the modules that output CSAC's feature maps, from shallow to deep; empty for ViT
    level_margin: how many pixels smaller the common size of projected levels is than the last level
    stages: the paths of the modules of stage 1, 2, ...; norm layers outside them belong to the stem
    frozen: the names of the state's entries that are not trained (`model.train`)
    clients: the number of clients that train, for inserts that need it (`Insert.counts_clients`); otherwise 0
    side: the side in pixels of the images, where the backbone takes no other; 0: it takes others
    grayscale: one-channel images are repeated to the three channels that the backbone expects
    """

    def __init__(
        self,
        backbone: nn.Module,
        feature_dim: int,
        classes: int,
        *,
        bottleneck: int = 0,
        levels: tuple[str, ...] = (),
        level_margin: int = 0,
        stages: Mapping[int, tuple[str, ...]] | None = None,
        grayscale: bool = False,
        task: TaskRules = CLASSIFIES,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.bottleneck: nn.Module = nn.Identity()
        if bottleneck:
            self.bottleneck = nn.Sequential(nn.Linear(feature_dim, bottleneck), nn.BatchNorm1d(bottleneck), nn.ReLU())
        self.feature_dim = bottleneck or feature_dim
        self.outputs = classes
        self.head = task.head(self.feature_dim, classes)
        self.levels = levels
        self.level_margin = level_margin
        self.stages = dict(stages or {})
        self.frozen: frozenset[str] = frozenset()
        self.clients = 0
        self.side = 0
        self.grayscale = grayscale

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Features [B, feature_dim] (of maps [B, feature_dim, H, W]) after the bottleneck, the input of the head."""
        return self.bottleneck(self.pooled(x))

    def pooled(self, x: torch.Tensor) -> torch.Tensor:
        """Features [B, D] (of maps [B, D, H, W]) of the backbone, the input of the bottleneck."""
        return self.backbone(x.expand(-1, 3, -1, -1) if self.grayscale else x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [B, classes], of maps [B, structures, H, W]."""
        return self.head(self.features(x))
