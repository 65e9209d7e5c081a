"""The kept outputs on the unseen domain of tasks without classes: what was to be predicted, and what was.

`predictions/round000007.safetensors` in a run's folder holds `index` [N] (the example's number in its domain), `truth`
[N, Q] and `predicted` [N, Q], and the names of the Q outputs. A regression has one output, in the user's unit; several
labels have the probability of each. Metrics are computed from them when they are read.
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
from fedsim.common.measures import area_under_roc
from fedsim.common.tasks import MULTI_LABEL, REGRESSION
from fedsim.records.predictions import chosen_file, predictions_file
from fedsim.records.readers import named

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Outputs:
    """index [N] int64, truth and predicted [N, Q] float32, names: Q outputs."""

    index: np.ndarray
    truth: np.ndarray
    predicted: np.ndarray
    names: tuple[str, ...]

    @classmethod
    def of(
        cls,
        index: np.ndarray,
        truth: "Tensor",
        kept: "Tensor",
        images: "Tensor",
        names: Sequence[str],
    ) -> "Outputs":
        """The outputs with targets [N, Q] and predictions [N, Q], given as tensors; the examples are not kept."""
        return cls(index, truth.cpu().numpy(), kept.cpu().numpy(), tuple(names))

    def details(self) -> list[tuple[str, str, float]]:
        """(`auroc`, label, its AUROC) for details.csv where there are several labels; undefined ones are left out."""
        if len(self.names) < 2:
            return []
        rows = []
        for label, name in enumerate(self.names):
            area = area_under_roc(self.predicted[:, label], self.truth[:, label] == 1)
            if area == area:
                rows.append(("auroc", name, area))
        return rows

    def write(self, run: Path, round: int) -> None:
        """Write them atomically as a round's file, in the order of the examples' indices."""
        order = np.argsort(self.index, kind="stable")
        arrays: dict[str, np.ndarray] = {
            "index": self.index[order].astype(np.int64),
            "truth": np.ascontiguousarray(self.truth[order], dtype=np.float32),
            "predicted": np.ascontiguousarray(self.predicted[order], dtype=np.float32),
        }
        atomic_write(
            predictions_file(run, round), save(arrays, {"outputs": json.dumps(self.names, ensure_ascii=False)})
        )


def read_outputs(run: Path | str, select: str = "best_validation") -> Outputs:
    """The outputs of a finished run's round under a selection rule.

    Raises UserError where there are none, for those of another task, and for numbers that are not finite.
    """
    file = chosen_file(Path(run), select)
    with named(file, "the outputs"), safe_open(file, framework="numpy") as content:
        metadata = content.metadata() or {}
        if "outputs" not in metadata:
            raise UserError(f"{file}: predictions of classes or masks, not of {REGRESSION.name} or {MULTI_LABEL.name}")
        arrays = {name: content.get_tensor(name) for name in ("index", "truth", "predicted")}
        outputs = Outputs(**arrays, names=tuple(json.loads(metadata["outputs"])))
    shape = (len(outputs.index), len(outputs.names))
    if outputs.truth.shape != shape or outputs.predicted.shape != shape:
        raise UserError(f"{file}: targets, predictions and names do not fit together")
    if not np.isfinite(outputs.predicted).all():
        raise UserError(f"{file}: some predictions are no numbers; the run has diverged")
    return outputs
