"""TsmoBN: statistics of the unseen domain, updated over its test batches."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.common.tasks import ANY_TASK
from fedsim.models.infer.base import Batches, Infer, Predict, Uploads
from fedsim.models.infer.statistics import with_rule
from fedsim.models.net import Net
from fedsim.models.norms.moments import batch_moments, running
from fedsim.parts.facts import Fact


@dataclass(frozen=True)
class TsmoBN(Infer):
    """Each layer updates its statistics with each test batch, and then normalizes that batch by the updated values:

        mu <- tau mu + (1 - tau) mu_batch,   sigma^2 <- tau sigma^2 + (1 - tau) sigma_batch^2   (biased)

    Source: Jiang et al., 2021, known to us from a secondary description. The rule is
    transductive and depends on the order: test images come in an order that a fixed seed
    shuffles, and the statistics start again in each evaluation. `tau = 1` from the global
    start gives eval mode, and `tau = 0` the statistics of the current batch. A batch of a single
    value per channel (one image, one pixel) has no variance and updates nothing.

    tau: the weight of the statistics before the batch
    init: "first_batch" starts from the statistics of the first batch, "global" from those of the model
    batch: the number of images per update, for every size of the evaluation batches
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK

    tau: Annotated[float, Field(ge=0, le=1)] = 0.9
    init: Literal["first_batch", "global"] = "first_batch"
    batch: Annotated[int, Field(ge=1)] = 64
    transductive: ClassVar[bool] = True
    shuffled: ClassVar[bool] = True
    assumes = (Fact.BATCH_NORM, Fact.IMAGES)

    def begin(self, net: Net, batches: Batches, uploads: Uploads | None = None) -> Predict:
        """A network that updates its statistics."""
        states: dict[nn.Module, list[Tensor]] = defaultdict(list)  # of each layer its mean and variance

        def rule(mean: Tensor, variance: Tensor, bn: nn.BatchNorm2d, positions: int) -> tuple[Tensor, Tensor]:
            state = states[bn]
            if len(mean) * positions < 2:
                mu, square = state or running(bn)
                return mu, torch.sqrt(square + bn.eps)
            new = batch_moments(mean, variance)
            if not state:
                state[:] = new if self.init == "first_batch" else running(bn)
            state[:] = [self.tau * old + (1 - self.tau) * value for old, value in zip(state, new, strict=True)]
            return state[0], torch.sqrt(state[1] + bn.eps)

        ruled = with_rule(net, rule, pooled=True)
        return lambda images: torch.cat([ruled(part) for part in images.split(self.batch)])
