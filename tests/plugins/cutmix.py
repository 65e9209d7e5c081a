"""CutMix (Yun et al., ICCV 2019): a box of another image of the batch, and labels mixed by its area."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim import Batch, Fact, LocalRound, Objective, Recipe


@dataclass(frozen=True)
class Box(Objective):
    """CE(h(f(x')), (1 - s) y + s y_p), where x' is x with a box of the image p of the batch, and s the box's area."""

    breaks = (Fact.HARD_LABELS,)

    def begin(self, round: LocalRound) -> Callable[[Batch], Tensor]:
        """The loss of a batch; an update that asks for it twice gets it with the same box."""
        rng = round.rng("box")

        def draw(batch: Batch) -> tuple[Tensor, Tensor]:
            height, width = batch.images.shape[-2:]
            side, top, left = rng.random() ** 0.5, rng.integers(height), rng.integers(width)
            box = torch.zeros(height, width, device=batch.images.device)
            box[top : top + int(side * height), left : left + int(side * width)] = 1
            other = torch.from_numpy(rng.permutation(len(batch.images))).to(batch.images.device)
            labels = F.one_hot(batch.labels, round.classes).float()
            return torch.lerp(batch.images, batch.images[other], box), torch.lerp(labels, labels[other], box.mean())

        def loss(batch: Batch) -> Tensor:
            batch.images, batch.soft = batch.once(self, lambda: draw(batch))
            return round.forward(batch)

        return loss


cutmix = Recipe(objective=Box(), paper="Yun et al., ICCV 2019")
