"""AugMix: each image is mixed with versions of itself after chains of mild operations."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from clients.augment.operations import COLOUR, SIGNED, apply_operations
from clients.batch import Moment, Transfer
from clients.parts import Augment, LocalRound
from fedsim.common.errors import UserError
from fedsim.settings.experiment import Experiment

STRENGTHS = 10


def magnitude_table(height: int, width: int, every: bool) -> dict[str, Tensor]:
    """The ten magnitudes of each operation, in the units of `apply_operations`; `every` adds the four of colours."""
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
    images: Tensor,
    severity: int = 3,
    width: int = 3,
    depth: int = -1,
    alpha: float = 1.0,
    every: bool = True,
    alike: bool = False,
) -> Tensor:
    """m x + (1 - m) sum_i w_i chain_i(x) of images [B, C, H, W] in [0, 1]; every image has draws of its own:

        w ~ Dirichlet(alpha) of `width` chains, m ~ Beta(alpha, alpha)
        a chain has `depth` operations (1 to 3 where depth is -1), each uniform over the table
        the magnitude of an operation is uniform over the `severity` mildest of ten

    With `alike` the chains (operations, magnitudes, lengths) are drawn once for the whole batch, and only w and m for
    each image. Draws come from torch's generator.
    """
    count = len(images)
    draws = 1 if alike else count
    table = magnitude_table(images.shape[-2], images.shape[-1], every)
    names, values = list(table), torch.stack(list(table.values()))
    signed = torch.tensor([name in SIGNED for name in names])
    weights, share = _mixing_weights(count, width, float(alpha))
    total = images * share.to(images, non_blocking=True)[:, None, None, None]
    chains = images.repeat(width, 1, 1, 1)  # all at once, because small batches cost as much time as large ones
    for acting, chosen, strength, sign in _draws(width, depth, draws, count, len(names), severity, signed):
        magnitudes = values[chosen, strength] * sign
        places = acting.to(chains.device, non_blocking=True)
        chains.index_copy_(0, places, apply_operations(chains[places], names, chosen, magnitudes))
    for moved, weight in zip(chains.split(count), weights.unbind(1), strict=True):
        total = total + moved * (weight * (1 - share)).to(images, non_blocking=True)[:, None, None, None]
    return total.clamp_(0, 1)


def _mixing_weights(count: int, width: int, alpha: float) -> tuple[Tensor, Tensor]:
    """w [count, width] ~ Dirichlet(alpha) and m [count] ~ Beta(alpha, alpha), in this order."""
    weights = torch.distributions.Dirichlet(torch.full((width,), alpha)).sample((count,))
    return weights, torch.distributions.Beta(alpha, alpha).sample((count,))


def _draws(
    width: int, depth: int, draws: int, count: int, operations: int, severity: int, signed: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    """For the first operation of every chain, the second, ...: (the places of the images that it changes, in all chains
    one after the other; its operation; its strength; its sign)."""
    steps: list[list[tuple[Tensor, ...]]] = []
    for chain in range(width):
        lengths = (torch.randint(1, 4, (draws,)) if depth < 0 else torch.full((draws,), depth)).expand(count)
        for position in range(int(lengths.max())):
            chosen = torch.randint(operations, (draws,)).expand(count)
            strength = torch.randint(severity, (draws,)).expand(count)
            sign = torch.where(signed[chosen] & (torch.rand(draws) < 0.5), -1.0, 1.0)
            acting = (lengths > position).nonzero()[:, 0]
            if position == len(steps):
                steps.append([])
            steps[position].append((acting + chain * count, chosen[acting], strength[acting], sign[acting]))
    return (tuple(torch.cat(parts) for parts in zip(*step)) for step in steps)


@dataclass(frozen=True)
class AugMix(Augment):
    """m x + (1 - m) sum_i w_i chain_i(x): the images of AugMix, without its loss (see the step `consistent_views`).

    Source: AugMix (Hendrycks et al., ICLR 2020), with torchvision's operations and magnitudes. It acts after the data
    set's own crop, flip and jitter, and on training images alone. `severity = 1` with `all_operations = false` leaves
    only auto_contrast, equalize and posterize with an effect.

    severity: the magnitude is drawn from so many of the mildest of ten
    width: the number of chains
    depth: the number of operations in a chain; -1 draws 1 to 3
    alpha: the parameter of the Dirichlet and Beta distributions
    all_operations: whether brightness, color, contrast and sharpness are used too (torchvision). The paper leaves them
    out, because its test corruptions contain them
    """

    severity: Annotated[int, Field(ge=1, le=STRENGTHS)] = 3
    width: Annotated[int, Field(ge=1)] = 3
    depth: Annotated[int, Field(ge=-1)] = -1
    alpha: Annotated[float, Field(gt=0)] = 1.0
    all_operations: bool = True
    moment: ClassVar[Moment] = "augmented"

    def check(self, experiment: Experiment) -> None:
        """Refuses chains without an operation."""
        if self.depth == 0:
            raise UserError("aug_mix.depth = 0: a chain has 1 operation or more, or -1 for a random number of them")

    def begin(self, round: LocalRound) -> Transfer:
        """A function that returns the mixtures of a batch."""
        return lambda images, items: self.augmented(images)

    def augmented(self, images: Tensor) -> Tensor:
        """The mixtures of images [B, C, H, W] in [0, 1]."""
        return mixed(images, self.severity, self.width, self.depth, self.alpha, self.all_operations)
