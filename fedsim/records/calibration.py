"""How far the probabilities of predictions are from the share of them that is right."""

import numpy as np

from fedsim.records.predictions import Predictions

BINS = 15


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
