"""Metrics of classes, of ranks and of numbers, as pure functions over arrays; NaN where one is not defined.

A class without an example is left out of every mean over classes: nothing can be measured on it.
"""

import math
from typing import NamedTuple

import numpy as np


def macro_f1(label: np.ndarray, predicted: np.ndarray) -> float:
    """Mean over the classes that are there of F1 = 2 TP / (2 TP + FP + FN).

    label, predicted: [N] numbers of classes

    >>> macro_f1(np.array([0, 0, 1, 1]), np.array([0, 1, 1, 1]))
    0.7333333333333334
    """
    scores = []
    for number in np.unique(label):
        right = np.count_nonzero((label == number) & (predicted == number))
        both = np.count_nonzero(label == number) + np.count_nonzero(predicted == number)
        scores.append(2 * right / both)
    return float(np.mean(scores))


def auroc(label: np.ndarray, probabilities: np.ndarray) -> float:
    """Mean over the classes of the area under the ROC curve, one class against the rest; NaN with one class only.

    The area is Mann and Whitney's U / (n_1 n_0), from the ranks of all classes at once.

    label: [N] numbers of classes. probabilities: [N, classes]

    >>> auroc(np.array([0, 0, 1]), np.array([[0.9, 0.1], [0.4, 0.6], [0.5, 0.5]]))
    0.5
    """
    from scipy.stats import rankdata

    present, counts = np.unique(label, return_counts=True)
    if len(present) < 2:
        return math.nan
    ranks = rankdata(probabilities[:, present], axis=0)
    is_of_class = label[:, None] == present
    sums = (ranks * is_of_class).sum(axis=0)
    least = counts * (counts + 1) / 2
    u = sums - least
    others = len(label) - counts
    areas = u / (counts * others)
    return float(np.mean(areas))


def of_classes(name: str, label: np.ndarray, probabilities: np.ndarray) -> float:
    """The metric of that name, `macro_f1` or `auroc`; NaN where it is not defined."""
    if name == "macro_f1":
        return macro_f1(label, probabilities.argmax(axis=1))
    return auroc(label, probabilities)


def area_under_roc(scores: np.ndarray, positive: np.ndarray) -> float:
    """Area under the ROC curve, U / (P N): the share of pairs whose positive example has the greater score.

    A pair of equal scores counts half (Mann and Whitney). scores: [N] numbers; positive: [N] bool. NaN where all
    examples are of one kind, because there is no pair.
    """
    from scipy.stats import rankdata

    positive = np.asarray(positive, dtype=bool)
    count = int(positive.sum())
    others = len(positive) - count
    if not count or not others:
        return float("nan")
    ranks = rankdata(np.asarray(scores, dtype=np.float64))
    u = ranks[positive].sum() - count * (count + 1) / 2
    return float(u / (count * others))


def average_precision(scores: np.ndarray, positive: np.ndarray) -> float:
    """Area under the curve of precision over recall, as the sum of (R_k - R_(k-1)) P_k over distinct scores, downwards.

    It is scikit-learn's average precision, without interpolation. scores: [N] numbers; positive: [N] bool. NaN where
    all examples are of one kind: without a positive one there is no recall, and with these alone it is always 1.
    """
    positive = np.asarray(positive, dtype=bool)
    if positive.all() or not positive.any():
        return float("nan")
    order = np.argsort(-np.asarray(scores, dtype=np.float64), kind="stable")
    ordered = np.asarray(scores)[order]
    last_of_equals = np.append(ordered[1:] != ordered[:-1], True)
    hits = np.cumsum(positive[order])[last_of_equals]
    named = np.flatnonzero(last_of_equals) + 1
    recall = hits / positive.sum()
    steps = np.diff(recall, prepend=0.0)
    return float((steps * hits / named).sum())


class Rates(NamedTuple):
    """Shares of the positive and of the negative examples that are recognized; NaN without any of them."""

    sensitivity: float
    specificity: float


def rates_at(scores: np.ndarray, positive: np.ndarray, threshold: float) -> Rates:
    """Sensitivity and specificity where an example is called positive when its score is above the threshold."""
    positive = np.asarray(positive, dtype=bool)
    called = np.asarray(scores) > threshold
    return Rates(_share(called[positive]), _share(~called[~positive]))


def _share(flags: np.ndarray) -> float:
    return float(flags.mean()) if len(flags) else float("nan")


def best_threshold(scores: np.ndarray, positive: np.ndarray) -> float:
    """The threshold with the greatest sensitivity + specificity - 1 (Youden's J), of equal ones that nearest to 1/2.

    The candidates lie in the middle between neighbouring distinct scores, and one lies below all of them. scores: [N]
    probabilities of the positive class; positive: [N] bool. NaN where all examples are of one kind.
    """
    positive = np.asarray(positive, dtype=bool)
    if positive.all() or not positive.any():
        return float("nan")
    distinct, place = np.unique(np.asarray(scores, dtype=np.float64), return_inverse=True)
    positives = np.bincount(place[positive], minlength=len(distinct))
    negatives = np.bincount(place[~positive], minlength=len(distinct))
    # Entry k: the examples with a score of at most the k-th, which are called negative there.
    missed = np.cumsum(positives)[:-1] / positives.sum()
    spared = np.cumsum(negatives)[:-1] / negatives.sum()
    candidates = np.append((distinct[:-1] + distinct[1:]) / 2, distinct[0] - 1e-6)
    gains = np.append(spared - missed, 0.0)
    is_best = gains >= gains.max() - 1e-12
    best = candidates[is_best]
    return float(best[np.argmin(np.abs(best - 0.5))])


def mean_absolute_error(truth: np.ndarray, predicted: np.ndarray) -> float:
    """Mean of |y - f(x)| over all values, in the unit of the targets; NaN without any."""
    return float(np.abs(_errors(truth, predicted)).mean()) if len(truth) else float("nan")


def root_mean_squared_error(truth: np.ndarray, predicted: np.ndarray) -> float:
    """Square root of the mean of (y - f(x))^2 over all values, in the unit of the targets; NaN without any."""
    return float(np.sqrt((_errors(truth, predicted) ** 2).mean())) if len(truth) else float("nan")


def explained_variance(truth: np.ndarray, predicted: np.ndarray) -> float:
    """R2 = 1 - sum (y - f(x))^2 / sum (y - mean y)^2; below 0 where the mean predicts better.

    NaN where all targets are equal, or where there is one alone: there is no variance to explain.
    """
    truth = np.asarray(truth, dtype=np.float64)
    spread = float(((truth - truth.mean()) ** 2).sum()) if len(truth) else 0.0
    if not spread:
        return float("nan")
    return 1 - float((_errors(truth, predicted) ** 2).sum()) / spread


def _errors(truth: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    return np.asarray(truth, dtype=np.float64) - np.asarray(predicted, dtype=np.float64)
