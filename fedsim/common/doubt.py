"""How sure a model may be: a temperature that calibrates its probabilities, and sets of classes that hold the true one.

Both are fitted to labelled examples that the model was not trained on. Nothing is needed of them but sums and counts,
so that several sites can fit them together without any row leaving its site.

The temperature T divides the logits z. It is that with the least mean cross-entropy (Guo et al., ICML 2017). There the
slope is 0, which rises with T:

    slope(T) = sum_i ( z_i[y_i] - sum_m p_im z_im )        p_i = softmax(z_i / T)

The score of an example is 1 - p[y]. With n scores, the threshold q is the k-th smallest, k = ceil((n + 1)(1 - alpha)),
and the set of an example has all classes with 1 - p_m <= q. Where examples are like those of the fit, the true class is
in the set with a probability of at least 1 - alpha (split conformal prediction; Sadinle et al., JASA 2019).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

LEAST, MOST = 1 / 16, 16.0  # temperatures
POINTS = 65  # temperatures of a grid
GRIDS = 3  # that are asked for, each between two neighbours of the one before
BINS = 1000  # of scores, of equal width, each with its upper end


@dataclass(frozen=True)
class Doubt:
    """What was fitted: alpha (the share of sets that may miss the class), the temperature and the threshold q.

    missing: the sources that did not answer
    """

    alpha: float
    temperature: float
    threshold: float
    missing: tuple[str, ...] = ()

    @property
    def remark(self) -> str:
        """A sentence on the sources without which this is fitted; empty for none."""
        if not self.missing:
            return ""
        return f"Not all sources answered: it is fitted without {', '.join(self.missing)}."

    def calibrated(self, probabilities: np.ndarray) -> np.ndarray:
        """Probabilities [N, M] at the temperature, of those that a softmax gave at temperature 1."""
        logits = np.log(np.maximum(probabilities.astype(np.float64), np.finfo(np.float32).tiny))
        return softmax(logits / self.temperature)

    def sets(self, calibrated: np.ndarray) -> np.ndarray:
        """Whether each class is in the set of each example, bool [N, M]; a set may be empty."""
        return np.round(1 - calibrated, 9) <= self.threshold  # as `score_counts` rounds


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities [..., M] of logits [..., M], in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    powers = np.exp(shifted)
    return powers / powers.sum(axis=-1, keepdims=True)


def slopes(logits: np.ndarray, labels: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    """The slope [K] at each of K temperatures, of logits [N, M] and labels [N]."""
    logits = logits.astype(np.float64)
    of_label = logits[np.arange(len(labels)), labels]
    sums = []
    for temperature in temperatures:
        expected = (softmax(logits / temperature) * logits).sum(axis=1)
        sums.append((of_label - expected).sum())
    return np.array(sums)


def fit_temperature(slopes_at: Callable[[np.ndarray], np.ndarray]) -> float:
    """The temperature between LEAST and MOST at which the slope is 0, or the end that is nearest to it.

    slopes_at: a function that gives the slope, summed over all examples, at each temperature of a grid

        >>> logits, labels = np.array([[4.0, 0], [0, 3], [2, 0]]), np.array([0, 1, 1])
        >>> round(fit_temperature(lambda grid: slopes(logits, labels, grid)), 8)
        2.51818863
    """
    low, high = LEAST, MOST
    below = above = 0.0
    for _ in range(GRIDS):
        grid = np.geomspace(low, high, POINTS)
        values = slopes_at(grid)
        if values[0] >= 0:
            return float(grid[0])
        if values[-1] <= 0:
            return float(grid[-1])
        place = int(np.argmax(values > 0))
        low, high = grid[place - 1], grid[place]
        below, above = values[place - 1], values[place]
    share = below / (below - above)
    return float(low * (high / low) ** share)


def score_counts(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """How many scores 1 - p[y] lie in each of BINS intervals (lo, hi], int64 [BINS]; 0 is in the first one."""
    scores = 1 - probabilities[np.arange(len(labels)), labels]
    places = np.ceil(np.round(scores * BINS, 6)).astype(int) - 1  # 1 - .9 is a little less than .1
    return np.bincount(places.clip(0, BINS - 1), minlength=BINS).astype(np.int64)


def threshold_of(counts: np.ndarray, alpha: float) -> float:
    """The upper end of the interval with the k-th smallest score; 1, with which all classes are in, for too few."""
    needed = math.ceil(round((counts.sum() + 1) * (1 - alpha), 9))
    if needed > counts.sum():
        return 1.0
    place = int(np.argmax(np.cumsum(counts) >= needed))
    return (place + 1) / BINS


def mean_loss(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The mean cross-entropy of probabilities [N, M] and labels [N]."""
    of_label = probabilities[np.arange(len(labels)), labels]
    return float(-np.log(np.maximum(of_label, np.finfo(np.float64).tiny)).mean())
