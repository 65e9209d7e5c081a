"""One training batch, as it passes through a client's step."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

Drawn = TypeVar("Drawn")
Transfer = Callable[[Tensor, np.ndarray], Tensor]  # (images of a batch, their items) -> images
# What a transfer gets: images as they are, after the data set's augmentation, or after its normalization too.
Moment = Literal["raw", "augmented", "normalized"]
LATE: Any = None  # the value of what is there before any part sees it


@dataclass
class Batch:
    """One training batch in a step; the forward pass fills `features`, `logits` and `loss`.

    labels: classes [B], or masks [B, Q, H, W]
    soft: mixed labels [B, M], or mixed masks, on which the task's loss is computed in place of `labels`
    loss: the loss of the task alone, before any term
    raw: the images in [0, 1] before augmentation
    prepare: gives other images of that shape (a transformed `raw`) the same augmentation and normalization as `images`
    augmented: the images in [0, 1] after augmentation; `normalize` completes other versions of them (views, tiles)
    positions: of the images among the client's training examples, on the host
    """

    images: Tensor
    labels: Tensor
    raw: Tensor = LATE
    prepare: Callable[[Tensor], Tensor] = LATE
    augmented: Tensor = LATE
    normalize: Callable[[Tensor], Tensor] = LATE
    features: Tensor = LATE
    logits: Tensor = LATE
    loss: Tensor = LATE
    positions: np.ndarray = LATE
    soft: Tensor | None = None
    drawn: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def truth(self) -> Tensor:
        """What the task's loss compares the logits with: soft labels where there are some."""
        return self.labels if self.soft is None else self.soft

    def part(self, rows: np.ndarray) -> "Batch":
        """A batch of these rows alone, before the forward pass; it has draws of its own."""
        index = torch.from_numpy(rows).to(self.images.device)

        def prepare(images: Tensor) -> Tensor:
            raw = self.raw.clone()
            raw[index] = images
            return self.prepare(raw)[index]

        return Batch(
            self.images[index],
            self.labels[index],
            self.raw[index],
            prepare,
            self.augmented[index],
            self.normalize,
            positions=self.positions[rows],
            soft=None if self.soft is None else self.soft[index],
        )

    def once(self, part: Hashable, draw: Callable[[], Drawn]) -> Drawn:
        """`draw()` for the batch's first pass, and the same value for every later one: an update may ask for the loss
        of a batch several times (FedSAM does), at other weights, but for the same draws."""
        if part not in self.drawn:
            self.drawn[part] = draw()
        return self.drawn[part]
