"""Metrics of predictions: accuracies, ranking, calibration, the confusion matrix.

Classes without an image in the target are left out of every mean over classes: nothing can be measured on them.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from fedsim.common import measures
from fedsim.common.errors import UserError, nearest
from fedsim.common.measures import (
    area_under_roc,
    average_precision,
    explained_variance,
    mean_absolute_error,
    rates_at,
    root_mean_squared_error,
)
from fedsim.common.tables import percent
from fedsim.common.tasks import (
    BINARY,
    BY_METRIC,
    CLASSIFICATION,
    MULTI_LABEL,
    REGRESSION,
    SEGMENTATION,
    WITH_CLASSES,
    Task,
)
from fedsim.records.calibration import expected_calibration_error
from fedsim.records.cases import Cases, read_cases
from fedsim.records.doubt import DOUBTS, read_doubted
from fedsim.records.outputs import Outputs, read_outputs
from fedsim.records.predictions import Predictions, Thresholded, pooled, read_predictions, read_thresholded
from fedsim.records.reading import Runs, run_folder

Kept = TypeVar("Kept", Predictions, Cases)
ONE_CLASS = "all examples there are of one class"


@dataclass(frozen=True)
class Metric:
    """A metric of a run: its title, how it is computed, and whether less is better.

    tasks: names of the tasks that have it
    read: function (run's folder, selection rule) -> what the metric is computed from
    is_fraction: whether it is shown in percent; otherwise it is a number in the user's unit
    undefined: why it may have no value on a domain, in words
    """

    title: str
    of: Callable[[Any], float]
    less_is_better: bool = False
    tasks: tuple[str, ...] = WITH_CLASSES
    read: Callable[[Path, str], Any] = read_predictions
    is_fraction: bool = True
    undefined: str = ""

    @property
    def factor(self) -> int:
        """By what values are multiplied where they are shown: 100 for a fraction."""
        return 100 if self.is_fraction else 1

    @property
    def heading(self) -> str:
        """The title with the unit, for columns and axes."""
        return f"{self.title} (%)" if self.is_fraction else self.title

    def number(self, value: float) -> str:
        """A value without its unit: percent with one decimal, or four digits of another number; a dash for NaN."""
        if self.is_fraction or np.isnan(value):
            return percent(value)
        return f"{value:.4g}"

    def spread(self, value: float) -> str:
        """A standard deviation: as `number` for a fraction, else with two digits; empty for NaN."""
        if np.isnan(value):
            return ""
        return percent(value) if self.is_fraction else f"{value:.2g}"

    def difference(self, value: float) -> str:
        """The difference of two values, with its sign: in points, or in the user's unit."""
        return f"{100 * value:+.1f}" if self.is_fraction else f"{value:+.3g}"


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
    return measures.macro_f1(label, predicted)


def auroc(predictions: Predictions) -> float:
    """Mean over the classes of the area under the ROC curve, one class against the rest; NaN with one class only."""
    label = predictions.label
    probabilities = predictions.probabilities
    return measures.auroc(label, probabilities)


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


def precision_of_second(predictions: Predictions) -> float:
    """Average precision of the second class; NaN with one class only. See `average_precision`."""
    return average_precision(predictions.probabilities[:, 1], predictions.label == 1)


def sensitivity(content: Thresholded) -> float:
    """The share of the second class's examples whose probability is above the threshold; NaN without any of them."""
    predictions, threshold = content
    return rates_at(predictions.probabilities[:, 1], predictions.label == 1, threshold).sensitivity


def specificity(content: Thresholded) -> float:
    """The share of the first class's examples whose probability is not above the threshold; NaN without any of them."""
    predictions, threshold = content
    return rates_at(predictions.probabilities[:, 1], predictions.label == 1, threshold).specificity


def mean_auroc(outputs: Outputs) -> float:
    """Mean of the AUROC of the labels that have one; NaN without any. A label that all examples have has none."""
    areas = []
    for label in range(len(outputs.names)):
        scores = outputs.predicted[:, label]
        has_label = outputs.truth[:, label] == 1
        area = area_under_roc(scores, has_label)
        if not np.isnan(area):
            areas.append(area)
    return float(np.mean(areas)) if areas else float("nan")


def label_accuracy(outputs: Outputs) -> float:
    """The share of all labels of all examples that a threshold of 1/2 recognizes."""
    called = outputs.predicted > 0.5
    has_label = outputs.truth > 0.5
    return float(np.mean(called == has_label))


def mean_dice(cases: Cases) -> float:
    """Mean over images and structures of Dice, of the structures that occur in the domain; NaN without any."""
    if not cases.occurs.any():
        return float("nan")
    return float(np.nanmean(cases.dice))


def relative_distance(cases: Cases) -> float:
    """Mean over images and structures of the average symmetric surface distance, divided by the image's diagonal."""
    *_, height, width = cases.images.shape
    diagonal = np.hypot(height, width)
    if not cases.occurs.any():
        return float("nan")
    distances = cases.surface_distance[:, cases.occurs]
    return float(distances.mean() / diagonal)


METRICS: dict[str, Metric] = {
    CLASSIFICATION.metric: Metric(CLASSIFICATION.title, accuracy),
    "balanced_accuracy": Metric("balanced accuracy", balanced_accuracy),
    "macro_f1": Metric("macro F1", macro_f1),
    BINARY.metric: Metric("AUROC, one class against the rest", auroc, undefined=ONE_CLASS),
    "ece": Metric("expected calibration error", expected_calibration_error, less_is_better=True),
    "coverage": Metric("coverage of the sets", DOUBTS["coverage"], read=read_doubted),
    "set_size": Metric(
        "classes in a set", DOUBTS["set_size"], less_is_better=True, read=read_doubted, is_fraction=False
    ),
    "calibrated_ece": Metric(
        "calibration error at the sources' temperature",
        DOUBTS["calibrated_ece"],
        less_is_better=True,
        read=read_doubted,
    ),
    "calibrated_loss": Metric(
        "cross-entropy at the sources' temperature",
        DOUBTS["calibrated_loss"],
        less_is_better=True,
        read=read_doubted,
        is_fraction=False,
    ),
    "auprc": Metric("average precision", precision_of_second, tasks=(BINARY.name,), undefined=ONE_CLASS),
    "sensitivity": Metric(
        "sensitivity at the sources' threshold",
        sensitivity,
        tasks=(BINARY.name,),
        read=read_thresholded,
        undefined="no example there is of the positive class",
    ),
    "specificity": Metric(
        "specificity at the sources' threshold",
        specificity,
        tasks=(BINARY.name,),
        read=read_thresholded,
        undefined="all examples there are of the positive class",
    ),
    MULTI_LABEL.metric: Metric(
        MULTI_LABEL.title,
        mean_auroc,
        tasks=(MULTI_LABEL.name,),
        read=read_outputs,
        undefined="every label there is one that all examples have, or none",
    ),
    "label_accuracy": Metric("accuracy over labels", label_accuracy, tasks=(MULTI_LABEL.name,), read=read_outputs),
    REGRESSION.metric: Metric(
        REGRESSION.title,
        lambda outputs: mean_absolute_error(outputs.truth, outputs.predicted),
        less_is_better=True,
        tasks=(REGRESSION.name,),
        read=read_outputs,
        is_fraction=False,
    ),
    "rmse": Metric(
        "root mean squared error",
        lambda outputs: root_mean_squared_error(outputs.truth, outputs.predicted),
        less_is_better=True,
        tasks=(REGRESSION.name,),
        read=read_outputs,
        is_fraction=False,
    ),
    "r2": Metric(
        "R2",
        lambda outputs: explained_variance(outputs.truth, outputs.predicted),
        tasks=(REGRESSION.name,),
        read=read_outputs,
        is_fraction=False,
        undefined="all targets there are equal",
    ),
    SEGMENTATION.metric: Metric(
        SEGMENTATION.title,
        mean_dice,
        tasks=(SEGMENTATION.name,),
        read=read_cases,
        undefined="no structure has a pixel there",
    ),
    "surface_distance": Metric(
        "surface distance as a share of the diagonal",
        relative_distance,
        less_is_better=True,
        tasks=(SEGMENTATION.name,),
        read=read_cases,
    ),
}


def find_metric(name: str, own: str) -> str:
    """The name of a metric of runs whose task has the metric `own`; UserError for one that they do not have."""
    names = metrics_of(BY_METRIC[own])
    if name not in METRICS:
        near = nearest(name, names)
        raise UserError(f"unknown metric {name!r}; {near}known: {', '.join(names)}")
    if name not in names:
        raise UserError(f"these runs have no {name}, a metric of another task; theirs are {', '.join(names)}")
    return name


def metrics_of(task: Task) -> list[str]:
    """The names of the metrics that runs of a task have."""
    return [name for name, metric in METRICS.items() if task.name in metric.tasks]


def metric_values(runs: Runs, metric: str, select: str) -> tuple[dict[str, float | None], list[str]]:
    """({run: the metric of its predictions under a selection rule}, the reasons why some runs have none).

    The metric of a run without readable predictions is None, and NaN where it is undefined. Raises UserError with the
    first reason when no run has any.
    """
    measure = METRICS[metric]
    values: dict[str, float | None] = {}
    reasons = []
    for run in runs.summary["run"]:
        try:
            folder = run_folder(runs, run)
            content = measure.read(folder, select)
            values[run] = measure.of(content)
        except UserError as error:
            values[run] = None
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


def frequent_class_shares(runs: Runs, table: pd.DataFrame, select: str) -> dict[str, tuple[int, float]]:
    """Return {target: (tested examples, share of the most frequent class)}, for targets with kept predictions.

    They are those of one run: the first of those that are tested on the most examples and kept their predictions.
    """
    shares: dict[str, tuple[int, float]] = {}
    ordered = table.sort_values(
        "target_images",
        ascending=False,
        kind="stable",
    )
    for row in ordered.itertuples():
        if row.target in shares:
            continue
        with contextlib.suppress(UserError):
            folder = run_folder(runs, row.run)
            labels = read_predictions(folder, select).label
            counts = np.bincount(labels)
            examples = len(labels)
            most = counts.max()
            shares[row.target] = (examples, most / examples)
    return dict(sorted(shares.items()))
