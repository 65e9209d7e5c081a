"""AugMix's training: the predictions for an image and for two mixtures of it must agree."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from clients.augment.aug_mix import STRENGTHS, mixed
from clients.parts import Batch, LocalRound, Objective, StepFunction
from clients.tools.losses import js_divergence
from fedsim.models.inserts.base import leading
from fedsim.parts.facts import Fact
from fedsim.settings.effect import Above, Only
from fedsim.settings.tuned import DECADE, Tuned


@dataclass(frozen=True)
class ConsistentViews(Objective):
    """L = CE(p_0, y) + weight JS(p_0, p_1, p_2) + terms; p_0 is for the image, p_1 and p_2 for AugMix versions.

        JS = mean_v KL(p_v || M), where M is the mean of the three, clipped at 1e-7; mean over the batch

    Source: AugMix (Hendrycks et al., ICLR 2020). The operations, their magnitudes and defaults are torchvision's; the
    paper leaves out the four colour operations (`all_operations = false`). The three versions share the data set's own
    crop, flip and jitter, and go through the network as one batch, as in the released code. Terms see the image without
    mixture. `weight = 0` gives FedAvg.

    weight: 12 in the paper
    severity, width, depth, alpha, all_operations: as in the augmentation `aug_mix`
    """

    assumes = (Fact.OBJECTIVE, Fact.IMAGES)

    weight: Annotated[float, Field(ge=0), Tuned("log:1.2:120", DECADE)] = 12.0
    severity: Annotated[int, Field(ge=1, le=STRENGTHS), Only(weight=Above(0))] = 3
    width: Annotated[int, Field(ge=1), Only(weight=Above(0))] = 3
    depth: Annotated[int, Field(ge=-1), Only(weight=Above(0))] = -1
    alpha: Annotated[float, Field(gt=0), Only(weight=Above(0))] = 1.0
    all_operations: Annotated[bool, Only(weight=Above(0))] = True
    columns: ClassVar[tuple[str, ...]] = ("js_loss",)

    @property
    def compiles(self) -> bool:
        """Three versions go through the network as one batch."""
        return self.weight == 0

    def begin(self, round: LocalRound) -> StepFunction:
        """The loss of three versions, or of the image alone when the weight is 0."""
        if self.weight == 0:
            return round.forward

        def loss(batch: Batch) -> Tensor:
            versions = batch.once(self, lambda: [self.version(batch) for _ in range(2)])
            with round.autocast():
                features = round.net.features(torch.cat([batch.images, *versions]))
                logits = round.net.head(features).chunk(3)
            batch.features, batch.logits = leading(features, len(batch.labels)), logits[0]
            batch.loss = round.task.loss(batch.logits, batch.labels)
            divergence = js_divergence(logits)
            round.tally("js_loss", divergence)
            return batch.loss + self.weight * divergence

        return loss

    def version(self, batch: Batch) -> Tensor:
        """The network's input for one mixture of the batch."""
        images = mixed(batch.augmented, self.severity, self.width, self.depth, self.alpha, self.all_operations)
        return batch.normalize(images)
