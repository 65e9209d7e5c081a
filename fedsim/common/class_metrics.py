"""Metrics of predicted classes besides the accuracy, on arrays: macro F1 and the area under the ROC curve.

A class without an example is left out of every mean over classes: nothing can be measured on it.
"""

import math

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
