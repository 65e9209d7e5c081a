"""The kept results of a segmentation on the unseen domain: Dice and surface distance of every image, and examples.

`predictions/round000007.safetensors` in a run's folder holds `index` [N], `dice` [N, Q] and `surface_distance` [N, Q]
of Q structures. For the K worst, middle and best images it also holds `shown` [K] (their positions in `index`),
`images` [K, C, H, W], `truth` and `predicted` [K, Q, H, W]. The masks of all images would take many times the bytes of
the model.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from fedsim.common.errors import UserError
from fedsim.common.files import atomic_write
from fedsim.records.predictions import chosen_file, predictions_file
from fedsim.records.readers import named

if TYPE_CHECKING:
    from torch import Tensor

SHOWN = 3  # images of each kind: worst, middle, best
STRUCTURE_QUANTITIES = ("dice", "surface_distance")  # of details.csv, whose rows name a structure
ARRAYS = ("index", *STRUCTURE_QUANTITIES, "shown", "images", "truth", "predicted")


@dataclass(frozen=True)
class Cases:
    """index [N] int64, dice and surface_distance [N, Q] float64, shown [K] int64, images uint8 [K, C, H, W], truth and
    predicted uint8 [K, Q, H, W], structures: Q names. Images are in the order of their indices."""

    index: np.ndarray
    dice: np.ndarray
    surface_distance: np.ndarray
    shown: np.ndarray
    images: np.ndarray
    truth: np.ndarray
    predicted: np.ndarray
    structures: tuple[str, ...]

    @property
    def occurs(self) -> np.ndarray:
        """[Q] bool: which structures have a pixel in the truth of some image; nothing is measured of the others."""
        return np.isfinite(self.dice).any(axis=0)

    @classmethod
    def of(
        cls,
        index: np.ndarray,
        truth: "Tensor",
        predicted: "Tensor",
        images: "Tensor",
        structures: Sequence[str],
    ) -> "Cases":
        """The cases of predicted masks [N, Q, H, W] and the true ones; images: uint8 [N, C, H, W]."""
        from fedsim.models.surfaces import surface_distance  # it imports torch, which reading does not need
        from fedsim.models.tasks import dice_of

        order = np.argsort(index, kind="stable")
        dice = dice_of(predicted, truth).cpu().numpy()[order]
        occurs = truth.bool().any(3).any(2).any(0)
        dice[:, ~occurs.cpu().numpy()] = np.nan  # a structure that the domain lacks
        y, p = (masks.cpu().numpy()[order].astype(np.uint8) for masks in (truth, predicted))
        distances = []
        for case in zip(p, y):
            distances.append([surface_distance(*structure) for structure in zip(*case)])
        shown = worst_middle_best(mean_over_structures(dice))
        return cls(
            index=index[order],
            dice=dice,
            surface_distance=np.array(distances),
            shown=shown,
            images=images[order[shown].tolist()].cpu().numpy(),
            truth=y[shown],
            predicted=p[shown],
            structures=tuple(structures),
        )

    def means(self, quantity: str) -> np.ndarray:
        """[Q] the mean of a quantity over the images; NaN for structures that do not occur."""
        return np.where(self.occurs, getattr(self, quantity).mean(axis=0), np.nan)

    def details(self) -> list[tuple[str, str, float]]:
        """(quantity, structure, mean over the images) for details.csv; distances in pixels."""
        rows = []
        for quantity in STRUCTURE_QUANTITIES:
            means = self.means(quantity)
            rows += [(quantity, self.structures[place], float(means[place])) for place in np.flatnonzero(self.occurs)]
        return rows

    def write(self, run: Path, round: int) -> None:
        """Write them atomically as a round's file."""
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in ARRAYS}
        metadata = {"structures": json.dumps(list(self.structures), ensure_ascii=False)}
        atomic_write(predictions_file(run, round), save(arrays, metadata))


def mean_over_structures(dice: np.ndarray) -> np.ndarray:
    """[N] the mean Dice of each image over the structures that occur in the domain; 0 where none does."""
    occurs = np.isfinite(dice).any(axis=0)
    return dice[:, occurs].mean(axis=1) if occurs.any() else np.zeros(len(dice))


def worst_middle_best(score: np.ndarray) -> np.ndarray:
    """Positions of the three least, most central and greatest of the scores [N], in this order.

    A small set has fewer of each.
    """
    order = np.argsort(score, kind="stable")
    each = min(SHOWN, max(1, len(order) // 3))
    middle = (len(order) - each) // 2
    if len(order) < 3:
        return order
    worst, best = order[:each], order[len(order) - each :]
    return np.concatenate([worst, order[middle : middle + each], best])


def read_cases(run: Path | str, select: str = "best_validation") -> Cases:
    """The kept cases of a finished run's round under a selection rule; UserError where there are none."""
    file = chosen_file(Path(run), select)
    with named(file, "the cases"), safe_open(file, framework="numpy") as content:
        metadata = content.metadata() or {}
        if "structures" not in metadata:
            raise UserError(f"{file}: predictions of classes, not of masks")
        arrays = {name: content.get_tensor(name) for name in ARRAYS}
        return Cases(**arrays, structures=tuple(json.loads(metadata["structures"])))
