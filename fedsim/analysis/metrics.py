"""Metrics of predictions: accuracies, ranking, calibration, the confusion matrix.

Classes without an image in the target are left out of every mean over classes: nothing can be measured on them.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedsim.common import class_metrics
from fedsim.common.errors import UserError, nearest
from fedsim.common.tasks import CLASSIFICATION, SEGMENTATION
from fedsim.records.cases import Cases, read_cases
from fedsim.records.predictions import Predictions, pooled, read_predictions
from fedsim.records.reading import Runs, run_folder

Kept = TypeVar("Kept", Predictions, Cases)
BINS = 15


@dataclass(frozen=True)
class Metric:
    """A metric of a run: its title, how it is computed, and whether less is better.

    read: function (run's folder, selection rule) -> what the metric is computed from.
    primary: whether it is a task's own metric, which the records already hold.
    """

    title: str
    of: Callable[[Any], float]
    less_is_better: bool = False
    read: Callable[[Path, str], Any] = read_predictions
    primary: bool = False


def accuracy(predictions: Predictions) -> float:
    """The share of images whose most probable class is their label."""
    is_right = predictions.predicted == predictions.label
    return float(np.mean(is_right))


def balanced_accuracy(predictions: Predictions) -> float:
    """Mean over the classes of the share of their images that is recognized (recall)."""
    return float(np.nanmean(per_class_accuracy(predictions)))


def macro_f1(predictions: Predictions) -> float:
    """Mean over the classes of F1 = 2 TP / (2 TP + FP + FN)."""
    label, predicted = predictions.label, predictions.predicted
    return class_metrics.macro_f1(label, predicted)


def auroc(predictions: Predictions) -> float:
    """Mean over the classes of the area under the ROC curve, one class against the rest; NaN with one class only."""
    label = predictions.label
    probabilities = predictions.probabilities
    return class_metrics.auroc(label, probabilities)


def expected_calibration_error(predictions: Predictions, bins: int = BINS) -> float:
    """ECE = sum_b n_b / N |accuracy_b - confidence_b| over bins of equal width of the greatest probability.

    Source: Guo et al., ICML 2017, equation 3, 15 bins (lo, hi].
    """
    count, right, confidence = confidence_bins(predictions, bins)
    gaps = np.abs(right - confidence)
    return float(gaps.sum() / count.sum())


def confidence_bins(predictions: Predictions, bins: int = BINS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """([B] images, [B] right predictions, [B] sum of the greatest probabilities) in bins (lo, hi] of equal width."""
    confidence = predictions.probabilities.max(axis=1).astype(float)
    is_right = predictions.predicted == predictions.label
    upper_edge = np.ceil(confidence * bins).astype(int)
    place = np.clip(upper_edge - 1, 0, bins - 1)
    count = np.bincount(place, minlength=bins)
    right = np.bincount(place, is_right, bins)
    total = np.bincount(place, confidence, bins)
    return count, right, total


def per_class_accuracy(predictions: Predictions) -> np.ndarray:
    """[M] Share of each class's images that is recognized; NaN for a class without images."""
    matrix = confusion_matrix(predictions)
    total = matrix.sum(axis=1)
    with np.errstate(invalid="ignore"):
        shares = np.diag(matrix) / total
    return np.where(total > 0, shares, np.nan)


def confusion_matrix(predictions: Predictions) -> np.ndarray:
    """[M, M] Number of images of the row's class that are predicted as the column's class."""
    classes = len(predictions.classes)
    row = predictions.label.astype(np.int64)
    place = row * classes + predictions.predicted
    counts = np.bincount(place, minlength=classes**2)
    return counts.reshape(classes, classes)


def mean_dice(cases: Cases) -> float:
    """Mean over images and structures of Dice."""
    return float(cases.dice.mean())


def relative_distance(cases: Cases) -> float:
    """Mean over images and structures of the average symmetric surface distance, divided by the image's diagonal."""
    *_, height, width = cases.images.shape
    diagonal = np.hypot(height, width)
    return float(cases.surface_distance.mean() / diagonal)


METRICS: dict[str, Metric] = {
    CLASSIFICATION.metric: Metric(CLASSIFICATION.title, accuracy, primary=True),
    "balanced_accuracy": Metric("balanced accuracy", balanced_accuracy),
    "macro_f1": Metric("macro F1", macro_f1),
    "auroc": Metric("AUROC, one class against the rest", auroc),
    "ece": Metric("expected calibration error", expected_calibration_error, less_is_better=True),
    SEGMENTATION.metric: Metric(SEGMENTATION.title, mean_dice, read=read_cases, primary=True),
    "surface_distance": Metric(
        "surface distance as a share of the diagonal",
        relative_distance,
        less_is_better=True,
        read=read_cases,
    ),
}


def find_metric(name: str, own: str) -> str:
    """The name of a metric of runs whose task has the metric `own`; UserError for one that they do not have."""
    read = METRICS[own].read
    names = []
    for each, metric in METRICS.items():
        if metric.read is read:
            names.append(each)
    if name not in METRICS:
        near = nearest(name, names)
        raise UserError(f"unknown metric {name!r}; {near}known: {', '.join(names)}")
    if name not in names:
        raise UserError(f"these runs have no {name}, a metric of another task; theirs are {', '.join(names)}")
    return name


def metric_values(runs: Runs, metric: str, select: str) -> tuple[dict[str, float], list[str]]:
    """({run: the metric of its predictions under a selection rule}, the reasons why some runs have none).

    The metric of a run without readable predictions is NaN. Raises UserError with the first reason when no run has any.
    """
    measure = METRICS[metric]
    values, reasons = {}, []
    for run in runs.summary["run"]:
        try:
            folder = run_folder(runs, run)
            content = measure.read(folder, select)
            values[run] = measure.of(content)
        except UserError as error:
            values[run] = float("nan")
            reasons.append(str(error))
    if len(reasons) == len(values):
        raise UserError(f"{metric} needs kept predictions: {reasons[0]}")
    return values, reasons


def kept(
    runs: Runs,
    labels: Mapping[str, str],
    select: str,
    read: Callable[[Path, str], Kept],
) -> dict[str, dict[str, list[Kept]]]:
    """{label: {target: what its runs have kept, in the order of their seeds}} of the runs that have kept something.

    read: `read_predictions` or `read_cases`
    """
    by_label: dict[str, dict[str, list[Kept]]] = {}
    for row in runs.summary.sort_values("seed", kind="stable").itertuples():
        with contextlib.suppress(UserError):
            folder = run_folder(runs, row.run)
            content = read(folder, select)
            by_target = by_label.setdefault(labels[row.run], {})
            of_target = by_target.setdefault(row.target, [])
            of_target.append(content)
    for label, by_target in by_label.items():
        by_label[label] = dict(sorted(by_target.items()))
    return by_label


def kept_predictions(runs: Runs, labels: Mapping[str, str], select: str) -> dict[str, dict[str, Predictions]]:
    """{label: {target: predictions of all its seeds}} of the runs that have kept predictions."""
    predictions: dict[str, dict[str, Predictions]] = {}
    for label, by_target in kept(runs, labels, select, read_predictions).items():
        predictions[label] = {}
        for target, seeds in by_target.items():
            predictions[label][target] = pooled(seeds)
    return predictions
