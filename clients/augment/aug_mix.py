"""AugMix: each image mixed with chains of mild operations on itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.augment.operations import COLOUR, SIGNED, apply_operations
from clients.parts import Augment, LocalRound
from fedsim.errors import UserError
from fedsim.experiment import Experiment

STRENGTHS = 10


def magnitude_table(height: int, width: int, every: bool) -> dict[str, Tensor]:
    """The ten magnitudes of each operation, in the units of `apply_operations`; `every`: the four of colours too."""
    share = torch.linspace(0, 1, STRENGTHS, dtype=torch.float64)
    none = torch.zeros_like(share)
    table = {
        "shear_x": 0.3 * share,
        "shear_y": 0.3 * share,
        "translate_x": width / 3 * share,
        "translate_y": height / 3 * share,
        "rotate": 30 * share,
        "posterize": 4 - (4 * share).round(),
        "solarize": 1 - share,
        "auto_contrast": none,
        "equalize": none,
    }
    return table | (dict.fromkeys(COLOUR, 0.9 * share) if every else {})


def mixed(
    images: Tensor, severity: int = 3, width: int = 3, depth: int = -1, alpha: float = 1.0, every: bool = True
) -> Tensor:
    """m x + (1 - m) sum_i w_i chain_i(x) of images [B, C, H, W] in [0, 1], every image with draws of its own:

    w ~ Dirichlet(alpha) of `width` chains, m ~ Beta(alpha, alpha), each chain `depth` operations long (-1: 1 to 3),
    each operation uniform over the table, its strength uniform over the `severity` mildest of ten. Draws come from
    torch's generator.
    """
    count = len(images)
    table = magnitude_table(*images.shape[-2:], every)
    names, values = list(table), torch.stack(list(table.values()))
    signed = torch.tensor([name in SIGNED for name in names])
    weights = torch.distributions.Dirichlet(torch.full((width,), float(alpha))).sample((count,))
    share = torch.distributions.Beta(float(alpha), float(alpha)).sample((count,))
    total = images * share.to(images)[:, None, None, None]
    for chain in range(width):
        lengths = torch.randint(1, 4, (count,)) if depth < 0 else torch.full((count,), depth)
        moved = images
        for position in range(int(lengths.max())):
            chosen = torch.randint(len(names), (count,))
            strength = torch.randint(severity, (count,))
            sign = torch.where(signed[chosen] & (torch.rand(count) < 0.5), -1.0, 1.0)
            acting = (lengths > position).nonzero()[:, 0]
            part = moved[acting.to(moved.device)]
            magnitudes = (values[chosen, strength] * sign)[acting]
            moved = moved.index_copy(
                0, acting.to(moved.device), apply_operations(part, names, chosen[acting], magnitudes)
            )
        total = total + moved * (weights[:, chain] * (1 - share)).to(images)[:, None, None, None]
    return total.clamp_(0, 1)


@dataclass(frozen=True)
class AugMix(Augment):
    """m x + (1 - m) sum_i w_i chain_i(x): the images of AugMix, without its loss (see the step `consistent_views`).

    AugMix (Hendrycks et al., ICLR 2020), with torchvision's operations and magnitudes. It comes after the data set's
    own crop, flip and jitter. Training images alone are changed. `severity = 1` with `all_operations = false` leaves
    all but auto_contrast, equalize and posterize without effect.

    severity: strengths drawn from the mildest so many of ten. width: chains. depth: operations of a chain, -1: 1 to 3.
    alpha: of the Dirichlet and Beta distributions. all_operations: brightness, color, contrast and sharpness too
        (torchvision); the paper leaves them out, because its test corruptions contain them.
    """

    severity: Annotated[int, Field(ge=1, le=STRENGTHS)] = 3
    width: Annotated[int, Field(ge=1)] = 3
    depth: Annotated[int, Field(ge=-1)] = -1
    alpha: Annotated[float, Field(gt=0)] = 1.0
    all_operations: bool = True
    late: ClassVar[bool] = True

    def check(self, experiment: Experiment) -> None:
        """A chain has a length."""
        if self.depth == 0:
            raise UserError("aug_mix.depth = 0: a chain has 1 operation or more, or -1 for a random number of them")

    def begin(self, round: LocalRound) -> Callable[[Tensor, np.ndarray], Tensor]:
        """The mixtures of a batch."""
        return lambda images, items: self.augmented(images)

    def augmented(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] in [0, 1] and what AugMix makes of them."""
        return mixed(images, self.severity, self.width, self.depth, self.alpha, self.all_operations)
