"""Normalization by statistics of clients: what they are, and those by which an unseen domain is predicted."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedsim.common.errors import UserError
from fedsim.common.tasks import ANY_TASK
from fedsim.models.infer.base import Batches, Infer, Predict, Uploads
from fedsim.models.net import Net
from fedsim.parts.facts import Fact

SMALLEST = 1e-6  # deviation by which images are divided

Moments = tuple[Tensor, Tensor]  # means and deviations of channels, float32 [1, C] each


def image_moments(batches: Iterable[Tensor]) -> Moments:
    """m = mean_i mean(x_i) and s = mean_i std(x_i) over all images x_i of the batches [B, C, H, W], per channel.

    mean(x_i) and std(x_i) are over the pixels of image i; std is unbiased. Sums are kept in float64.
    """
    sums: Tensor | float = 0.0
    count = 0
    for images in batches:
        pixels = images.double().flatten(2)
        sums = sums + torch.stack([pixels.mean(2), pixels.std(2)]).sum(1)
        count += len(images)
    mean, std = torch.as_tensor(sums / count).float().unsqueeze(1)
    return mean, std


def normalized(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(x - m) / s of images [B, C, H, W], with m and s [1, C] or [B, C]."""
    return (images - mean[..., None, None]) / std.clamp_min(SMALLEST)[..., None, None]


@dataclass(frozen=True)
class TargetNormalization(Infer):
    """f((x - m) / s) for the images x of the unseen domain, where f is the network.

        "mean":  m = (1/K) sum_k m_k,  s = (1/K) sum_k s_k, of the source clients k
        "own":   m and s of the images of the unseen domain, before it is predicted

    FedRDN (Yan et al., CVPR 2025) has no unseen domain: each client is tested by its own statistics. Both rules are
    ours. "mean" looks at one image at a time. "own" is what FedRDN does with a source; it needs all images of the
    domain, without labels, so that results are marked as transductive. The statistics m_k come from the bank
    `image_moments`. x is an image after `data.normalize`, as it is when clients measure theirs.

    statistics: which of the two rules
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK
    requires: ClassVar[dict[str, str]] = {"augment": "client_normalization"}
    assumes = (Fact.IMAGES,)

    statistics: Literal["mean", "own"] = "mean"

    @property
    def transductive(self) -> bool:
        """Whether the images of the unseen domain are measured before they are predicted."""
        return self.statistics == "own"

    @property
    def bank(self) -> str:
        """The clients' statistics, where the rule needs them."""
        return "" if self.transductive else "image_moments"

    @property
    def discloses(self) -> str:
        """What the unseen domain's machine gets."""
        return "" if self.transductive else "the unseen domain's machine gets these numbers too"

    def begin(self, net: Net, batches: Batches, uploads: Uploads | None = None) -> Predict:
        """The network behind the normalization. UserError where the clients' statistics are not there."""
        net.eval()
        mean, std = image_moments(batches()) if self.transductive else self._mean(uploads)
        return lambda images: net(normalized(images, mean, std))

    @staticmethod
    def _mean(uploads: Uploads | None) -> Moments:
        """The mean of the clients' statistics."""
        if not uploads:
            raise UserError("target_normalization needs the clients' statistics, which are kept next to the models "
                            "best and last; a personal model has none")  # fmt: skip
        mean, std = (torch.stack([entry[name] for entry in uploads]).mean(0) for name in ("mean", "std"))
        return mean, std
