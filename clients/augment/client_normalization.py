"""FedRDN: images are normalized in training by statistics of clients that are drawn, in evaluation by their own."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from clients.batch import Moment, Transfer
from clients.local_data import LocalData
from clients.parts import Augment, LocalRound
from fedsim.common.tasks import ANY_TASK
from fedsim.models.infer.target_normalization import Moments, image_moments, normalized
from fedsim.parts.facts import Fact

CHUNK = 256  # images that are measured at a time


@dataclass(frozen=True)
class ClientNormalization(Augment):
    """x <- (x - m_a) / s_b in training, with clients a and b that are drawn; (x - m_k) / s_k when client k validates.

        m_k = (1/n_k) sum_i mean(x_i),  s_k = (1/n_k) sum_i std(x_i)

    mean(x_i) and std(x_i) are those of a channel over the pixels of training image i, before any augmentation; std is
    unbiased. All clients are drawn with equal chances, the client itself among them, and the bank `image_moments` has
    their statistics.

    Source: FedRDN (Yan et al., CVPR 2025), from the released code (IAMJackYan/FedRDN 69f7f90). There the mean and the
    deviation are drawn apart from each other, once for each batch. We had no text of the paper; summaries of it draw
    both of one client, for each image (`draw = "image"`). The code has no validation but each client's test images,
    which it normalizes by the client's own statistics. So do we wherever a client measures a model on its own images.
    For the unseen domain, which the paper does not have, see `target_normalization`. All of it acts after
    `data.normalize`, which then changes no result: (x - m) / s is the same whatever shift and scale x had before. The
    released code trains AlexNet on Office-Caltech-10 by SGD (0.01, momentum 0.9, weight decay 1e-5) in batches of 32,
    for 100 rounds of 5 epochs. With one client it is a fixed normalization.

    draw: "batch" draws a mean and a deviation for each batch; "image" draws one client's pair for each image
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK
    moment: ClassVar[Moment] = "normalized"
    requires: ClassVar[dict[str, str]] = {"banks": "image_moments", "infer": "target_normalization"}
    breaks = (Fact.OWN_IMAGES, Fact.ONE_INPUT)

    draw: Literal["batch", "image"] = "batch"

    @property
    def bank(self) -> str:
        """The statistics of all clients."""
        return "image_moments"

    def collect(self, round: LocalRound) -> dict[str, np.ndarray]:
        """m_k and s_k, float32 [1, C]."""
        mean, std = statistics_of(round.data)
        return {"mean": mean.cpu().numpy(), "std": std.cpu().numpy()}

    def begin(self, round: LocalRound) -> Transfer:
        """A function that normalizes a batch by statistics which it draws."""
        rows = round.tensors("image_moments", "client_normalization")
        means, stds = rows["mean"], rows["std"]

        def transfer(images: Tensor, items: np.ndarray) -> Tensor:
            count = len(images) if self.draw == "image" else 1
            first = torch.randint(len(means), (count,))
            second = first if self.draw == "image" else torch.randint(len(stds), (count,))
            first, second = (index.to(images.device, non_blocking=True) for index in (first, second))
            return normalized(images, means[first], stds[second])

        return transfer

    def at_test(self, data: LocalData) -> Callable[[Tensor], Tensor]:
        """A function that normalizes images by the client's own statistics, computed at the first call."""
        moments = functools.cache(lambda: statistics_of(data))
        return lambda images: normalized(images, *moments())


@torch.inference_mode(False)
def statistics_of(data: LocalData) -> Moments:
    """m_k and s_k of a client's training images after `data.normalize`, [1, C] each on its device."""
    positions = data.training_positions()
    chunks = [positions[start : start + CHUNK] for start in range(0, len(positions), CHUNK)]
    return image_moments(data.normalize(data.raw(chunk)) for chunk in chunks)
