"""RandAugment: random operations with one common strength."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from clients.augment.operations import SIGNED, apply_operations
from clients.batch import Moment, Transfer
from clients.parts import Augment, LocalRound
from fedsim.common.errors import UserError
from fedsim.settings.effect import Above, Only
from fedsim.settings.experiment import Experiment
from fedsim.settings.tuned import Tuned


def magnitude_table(M: int, bins: int, height: int, width: int) -> dict[str, float]:
    """The magnitude of each of the 14 operations at strength M of `bins`, in the units of `apply_operations`."""
    share = M / (bins - 1)
    return {
        "identity": 0.0,
        "shear_x": 0.3 * share,
        "shear_y": 0.3 * share,
        "translate_x": 150 / 331 * width * share,
        "translate_y": 150 / 331 * height * share,
        "rotate": 30 * share,
        "brightness": 0.9 * share,
        "color": 0.9 * share,
        "contrast": 0.9 * share,
        "sharpness": 0.9 * share,
        "posterize": 8.0 - round(4 * share),
        "solarize": 1 - share,
        "auto_contrast": 0.0,
        "equalize": 0.0,
    }


@dataclass(frozen=True)
class RandAugment(Augment):
    """x' = o_N(... o_1(x)): N operations on every image, each drawn uniformly from 14, all with strength M.

    Source: RandAugment (Cubuk et al., NeurIPS 2020) with torchvision's operations and magnitudes. FedIG-A and
    COPA do not say which N and M they use; the defaults are torchvision's. Directions (of rotation, shear, translation,
    factor) are drawn with equal chances. It acts after the data set's own crop, flip and jitter, which it does not
    replace, and on training images alone. `N = 0` gives FedAvg.

    N: the number of operations per image
    M: the strength, from 0 to bins - 1
    bins: the number of strengths
    """

    N: Annotated[int, Field(ge=0), Tuned("1,2,3", "the paper's grid")] = 2
    M: Annotated[int, Field(ge=0), Only(N=Above(0)), Tuned("int:3:30", "the paper's range")] = 9
    bins: Annotated[int, Field(ge=2), Only(N=Above(0))] = 31
    moment: ClassVar[Moment] = "augmented"

    def check(self, experiment: Experiment) -> None:
        """Refuses an M that is not one of the strengths."""
        highest = self.bins - 1
        if highest < self.M:
            raise UserError(f"rand_augment.M = {self.M}: strengths go from 0 to bins - 1 = {highest}")

    def begin(self, round: LocalRound) -> Transfer:
        """A function that applies the operations to a batch."""
        return lambda images, items: self.augmented(images)

    def augmented(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] in [0, 1] after N operations each; draws come from torch's generator."""
        table = magnitude_table(self.M, self.bins, *images.shape[-2:])
        names, values = list(table), torch.tensor(list(table.values()), dtype=torch.float64)
        signed = torch.tensor([name in SIGNED for name in names])
        for _ in range(self.N):
            chosen = torch.randint(len(names), (len(images),))
            sign = torch.where(signed[chosen] & (torch.rand(len(images)) < 0.5), -1.0, 1.0)
            images = apply_operations(images, names, chosen, values[chosen] * sign)
        return images
