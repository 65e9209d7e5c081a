"""Batch-norm statistics computed again on the unseen domain."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fedsim.models.infer.base import Batches, Infer, Predict, Uploads
from fedsim.tasks import ANY_TASK


@dataclass(frozen=True)
class Recompute(Infer):
    """Batch-norm statistics computed again on the unseen domain's unlabelled images, in one pass with a cumulative
    average.

    Source: SiloBN (Andreux et al. 2020). The rule is transductive: it sees the test images before it predicts.
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK

    transductive: ClassVar[bool] = True

    @torch.no_grad()
    def begin(self, net: nn.Module, batches: Batches, uploads: Uploads | None = None) -> Predict:
        """Resets the statistics, passes all test images once, and then predicts in eval mode."""
        norms = [module for module in net.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        momenta = [norm.momentum for norm in norms]
        net.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # PyTorch then takes a cumulative average
            norm.train()
        for images in batches():
            net(images)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        net.eval()
        return net
