"""The kept predictions on the unseen domain: one file for each round that a selection rule chooses.

`predictions/round000007.safetensors` in a run's folder holds `index` [N] (the image's number in its domain), `label`
[N] and `probabilities` [N, M], and the names of the M classes. Metrics are computed from them when they are read
(`metrics.py`), so that a new metric needs no new run.
"""

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from fedsim.common.errors import UserError
from fedsim.common.files import atomic_write
from fedsim.records.readers import AGAIN, named
from fedsim.records.record_files import is_finished, read_columns, summary_rows
from fedsim.records.selection import RULES, Frame, select

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

FOLDER = "predictions"
# Files and bytes of predictions that a run keeps until it removes some; at its end one for each selection rule is kept.
UNREMOVED_FILES, UNREMOVED_BYTES = 100, 2**26


@dataclass(frozen=True)
class Predictions:
    """index [N] int64, label [N] int64, probabilities [N, M] float32 (rows sum to 1), classes: M names."""

    index: np.ndarray
    label: np.ndarray
    probabilities: np.ndarray
    classes: tuple[str, ...]

    @classmethod
    def of(
        cls,
        index: np.ndarray,
        truth: "Tensor",
        kept: "Tensor",
        images: "Tensor",
        classes: Sequence[str],
    ) -> "Predictions":
        """The predictions with labels [N] and probabilities [N, M], given as tensors; the images are not kept."""
        return cls(index, truth.cpu().numpy(), kept.cpu().numpy(), tuple(classes))

    def details(self) -> list[tuple[str, str, float]]:
        """No rows for details.csv: all numbers can be computed from the file."""
        return []

    def write(self, run: Path, round: int) -> None:
        """Write them atomically as a round's file, in the order of the images' indices."""
        order = np.argsort(self.index, kind="stable")
        arrays: dict[str, np.ndarray] = {
            "index": self.index[order].astype(np.int64),
            "label": self.label[order].astype(np.int64),
            "probabilities": np.ascontiguousarray(self.probabilities[order], dtype=np.float32),
        }
        # One entry: safetensors writes several metadata in any order, but equal predictions shall be equal bytes.
        metadata = {"classes": json.dumps(list(self.classes), ensure_ascii=False)}
        # Not synchronized to the disk, as the checkpoint is not: both survive a kill, and perhaps not a loss of power.
        atomic_write(predictions_file(run, round), save(arrays, metadata))

    @property
    def predicted(self) -> np.ndarray:
        """[N] The class of the greatest probability, the first of equals."""
        return self.probabilities.argmax(axis=1)

    def frame(self) -> "pd.DataFrame":
        """One row per image: index, label and predicted as class names, and each class's probability."""
        import pandas as pd

        names = np.array(self.classes, dtype=object)
        keys = pd.DataFrame(
            {
                "index": self.index,
                "label": names[self.label],
                "predicted": names[self.predicted],
            }
        )
        probabilities = pd.DataFrame(self.probabilities, columns=list(self.classes))
        return keys.join(probabilities, rsuffix=" (p)")


def predictions_file(run: Path, round: int) -> Path:
    """Where the predictions of a round are kept."""
    return run / FOLDER / f"round{round:06d}.safetensors"


def too_many(run: Path) -> bool:
    """Whether a run's folder holds the predictions of so many rounds that it is worth the time to remove some."""
    files = list((run / FOLDER).glob("round*.safetensors"))
    if not files:
        return False
    size = len(files) * files[0].stat().st_size
    return len(files) > UNREMOVED_FILES or size > UNREMOVED_BYTES


def keep_selected(run: Path, rounds: Frame, column: str) -> None:
    """Remove the predictions of rounds that no selection rule would choose now; rounds: the rows of rounds.csv."""
    chosen = selected_rounds(rounds, column)
    _remove(run, lambda round: round not in chosen)


def selected_rounds(rounds: Frame, column: str) -> set[int]:
    """The rounds that the selection rules would choose now; rounds: the rows of rounds.csv."""
    chosen: set[int] = set()
    for rule in RULES:
        with contextlib.suppress(UserError):  # there is no round to select yet, or all values are NaN
            chosen.add(int(select(rounds, rule, column)["round"]))
    return chosen


def forget_after(run: Path, round: int) -> None:
    """Remove the predictions of later rounds, which a resumed run computes again; -1 removes all."""
    _remove(run, lambda other: other > round)


def _remove(run: Path, unwanted: Callable[[int], bool]) -> None:
    for file in (run / FOLDER).glob("round*.safetensors"):
        if unwanted(int(file.stem.removeprefix("round"))):
            file.unlink(missing_ok=True)


def read_predictions(run: Path | str, select: str = "best_validation") -> Predictions:
    """The predictions of a finished run's round under a selection rule.

    Raises UserError where none were kept: for old records, for a target on a site of its own, and with
    `run.keep_predictions = false`.
    """
    return predictions_in(chosen_file(Path(run), select))


def predictions_in(file: Path) -> Predictions:
    """The predictions that a file holds; UserError where it cannot be read."""
    with named(file, "the predictions"), safe_open(file, framework="numpy") as content:
        predictions = Predictions(
            index=content.get_tensor("index"),
            label=content.get_tensor("label"),
            probabilities=content.get_tensor("probabilities"),
            classes=tuple(json.loads(content.metadata()["classes"])),
        )
    return checked(predictions, file)


Thresholded = tuple[Predictions, float]  # and the threshold of the second class's probability


def read_thresholded(run: Path | str, select: str = "best_validation") -> Thresholded:
    """The predictions of two classes, and the mean of the thresholds that the sources' validations of the round chose.

    Raises UserError where there are none, and where no source could choose a threshold.
    """
    predictions = read_predictions(run, select)
    chosen = int(predictions_round(Path(run), select))
    rounds = read_columns(Path(run) / "rounds.csv")
    column = "mean_validation_threshold"
    values: list[float] = []
    if column in rounds:
        values = rounds.chosen(rounds["round"] == chosen)[column].tolist()
    if not values or math.isnan(values[0]):
        raise UserError(f"{run}: no source chose a threshold in round {chosen}, because each validates on examples of "
                        "one class")  # fmt: skip
    return predictions, float(values[0])


def predictions_round(run: Path, select: str) -> str:
    """The number of the round whose predictions a selection rule chooses, as text."""
    return chosen_file(run, select).stem.removeprefix("round")


def chosen_file(run: Path, select: str) -> Path:
    """The file of a finished run's round under a selection rule; UserError where there is none."""
    if select not in RULES:
        raise UserError(f"unknown selection rule {select!r}; known: {', '.join(RULES)}")
    if not is_finished(run):
        raise UserError(f"{run}: no finished run")
    summary = summary_rows(run)  # a frame takes ten times as long, for every metric of every run
    if not summary:
        raise UserError(f"{run / 'summary.csv'} is empty or cut off; {AGAIN}")
    try:
        chosen = int(float(summary[0].get(f"{select}_round") or "nan"))
    except (ValueError, OverflowError):  # OverflowError: inf
        chosen = -1
    file = predictions_file(run, chosen)
    if not file.is_file():
        raise UserError(
            f"{run}: no predictions were kept of the round of {select}; run again with run.keep_predictions = true"
        )
    return file


def checked(predictions: Predictions, where: Path) -> Predictions:
    """The predictions; UserError when they do not fit together, or some probabilities are NaN or infinite."""
    count, classes = len(predictions.label), len(predictions.classes)
    fits = predictions.index.shape == predictions.label.shape == (count,)
    fits = fits and predictions.probabilities.shape == (count, classes)
    if fits and count:
        fits = 0 <= predictions.label.min() <= predictions.label.max() < classes
    if not fits:
        raise UserError(f"{where}: labels, probabilities and classes do not fit together")
    if not np.isfinite(predictions.probabilities).all():
        raise UserError(f"{where}: some probabilities are no numbers; the run has diverged")
    return predictions


def pooled(many: Sequence[Predictions]) -> Predictions:
    """The predictions of several runs on the same classes, e.g. of all seeds of a method, joined into one."""
    first = many[0]
    if any(other.classes != first.classes for other in many):
        raise UserError("predictions of different classes cannot be put together")
    return Predictions(
        index=np.concatenate([each.index for each in many]),
        label=np.concatenate([each.label for each in many]),
        probabilities=np.concatenate([each.probabilities for each in many]),
        classes=first.classes,
    )
