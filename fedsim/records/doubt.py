"""What a run records of `run.doubt`, and what it is worth on the unseen domain."""

from pathlib import Path

import numpy as np

from fedsim.common.doubt import Doubt, mean_loss
from fedsim.common.errors import UserError
from fedsim.records.calibration import expected_calibration_error
from fedsim.records.environment import read_environment
from fedsim.records.predictions import Predictions, predictions_round, read_predictions
from fedsim.records.selection import DEFAULT_RULE

KEY = "doubt"  # in environment.json
Doubted = tuple[Predictions, Doubt]


def read_doubt(run: Path) -> Doubt | None:
    """The doubt that belongs to a run's `best.safetensors`; None where none was fitted."""
    record = read_environment(run).get(KEY)
    if not record:
        return None
    return Doubt(record["alpha"], record["temperature"], record["threshold"], tuple(record.get("missing", ())))


def read_doubted(run: Path | str, select: str = DEFAULT_RULE) -> Doubted:
    """The predictions of the round for which the doubt was fitted, and the doubt; UserError where either is missing."""
    folder = Path(run)
    doubt = read_doubt(folder)
    if doubt is None:
        raise UserError(f"{run}: nothing was fitted to the sources' validation; run it with run.doubt = 0.1")
    predictions = read_predictions(folder, select)
    if predictions_round(folder, select) != predictions_round(folder, DEFAULT_RULE):
        raise UserError(f"{run}: run.doubt is fitted to the round of {DEFAULT_RULE}, and {select} chooses another one")
    return predictions, doubt


def coverage(content: Doubted) -> float:
    """The share of examples whose set has the true class."""
    predictions, doubt = content
    sets = doubt.sets(doubt.calibrated(predictions.probabilities))
    has_class = sets[np.arange(len(sets)), predictions.label]
    return float(has_class.mean())


def set_size(content: Doubted) -> float:
    """The mean number of classes in a set."""
    predictions, doubt = content
    sets = doubt.sets(doubt.calibrated(predictions.probabilities))
    return float(sets.sum(axis=1).mean())


def calibrated_error(content: Doubted) -> float:
    """The expected calibration error of the probabilities at the temperature."""
    predictions, doubt = content
    calibrated = doubt.calibrated(predictions.probabilities)
    return expected_calibration_error(
        Predictions(predictions.index, predictions.label, calibrated, predictions.classes)
    )


def calibrated_loss(content: Doubted) -> float:
    """The mean cross-entropy of the probabilities at the temperature."""
    predictions, doubt = content
    return mean_loss(doubt.calibrated(predictions.probabilities), predictions.label)


# By the names that metrics have, and columns of summary.csv.
DOUBTS = {
    "coverage": coverage,
    "set_size": set_size,
    "calibrated_ece": calibrated_error,
    "calibrated_loss": calibrated_loss,
}
