"""Standardizes tensors that are no images, by statistics that contain no example of the unseen domain.

    m_j = sum_c S_cj / sum_c N_cj        s_j^2 = sum_c Q_cj / sum_c N_cj - m_j^2        x_j <- (x_j - m_j) / s_j

N_cj, S_cj and Q_cj are the number, sum and sum of squares of the values of feature j (for other shapes than rows: of
channel j, over all its positions) in the training rows of client c, without missing ones. A feature that does not vary
has s_j = 1. A missing value becomes 0 afterwards, which is the mean.

data.scale = "federated" adds up the sums of all clients; they travel in the handshake. "site" standardizes each domain
by its own training rows, and the unseen domain by its own rows, without labels. The targets of a regression are
standardized by the sums of all clients in both cases: a site's own mean would tell what is to be predicted there.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedsim.common.errors import UserError
from fedsim.common.tasks import REGRESSION
from fedsim.data.findings import joined_names
from fedsim.data.row import Benchmark
from fedsim.settings import DataSettings

ROUNDING = 1e-9  # of a sum
SMALLEST = 1e-30  # squared mean that counts
TINY = 1e-12  # a variance below this share of the squared mean is the rounding of a constant


@dataclass(frozen=True)
class Moments:
    """What the values of J features sum up to: their numbers, sums and sums of squares, each [J]."""

    counts: tuple[int, ...]
    sums: tuple[float, ...]
    squares: tuple[float, ...]

    def joined(self, others: "Moments") -> "Moments":
        """These moments, followed by those of other columns of the same examples."""
        return Moments(
            self.counts + others.counts,
            self.sums + others.sums,
            self.squares + others.squares,
        )

    @property
    def is_valid(self) -> bool:
        """Whether such numbers can be sums of finite values at all: Q N >= S^2, up to rounding."""
        counts = np.array(self.counts, np.float64)
        sums = np.array(self.sums)
        squares = np.array(self.squares)
        if not len(counts) == len(sums) == len(squares):
            return False
        are_finite = np.isfinite([sums, squares]).all()
        if not are_finite or (counts < 0).any():
            return False
        most = squares * counts * (1 + ROUNDING) + ROUNDING
        return bool((sums**2 <= most).all())


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of J features."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def part(self, start: int, end: int) -> "Scale":
        """The scale of the features from `start` on, up to `end`."""
        return Scale(self.mean[start:end], self.std[start:end])

    def arrays(self, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Mean and std float32 for examples of this shape, 0 and 1 for features that are not standardized."""
        count = len(self.mean)
        mean = np.zeros(shape[0], np.float32)
        std = np.ones(shape[0], np.float32)
        mean[:count] = self.mean
        std[:count] = self.std
        axes = (-1, *[1] * (len(shape) - 1))
        return mean.reshape(axes), std.reshape(axes)

    def apply(self, values: np.ndarray) -> np.ndarray:
        """Values float32 [N, J', ...] standardized; a missing one (NaN) becomes 0."""
        mean, std = self.arrays(values.shape[1:])
        return np.nan_to_num((values - mean) / std, nan=0.0)


def scale_rule(data: DataSettings, bench: Benchmark) -> str:
    """How the examples of a data set are standardized: `federated`, `site` or `none`.

    Images and examples without a number to standardize, such as rows of categories alone, have `none`.
    """
    if not bench.numeric:
        return "none"
    if data.scale != "auto":
        return data.scale
    is_row = len(bench.shape) == 1
    return "federated" if is_row else "none"


def summed_features(data: DataSettings, bench: Benchmark) -> int:
    """The number of features of which clients send sums, the leading ones of an example."""
    return bench.numeric if scale_rule(data, bench) == "federated" else 0


def scale_of_features(scale: Scale | None, data: DataSettings, bench: Benchmark) -> Scale | None:
    """The part of a run's scale that standardizes features, without that of targets; None where none are scaled."""
    features = summed_features(data, bench)
    if not scale or not features:
        return None
    return scale.part(0, features)


def scales_targets(data: DataSettings, bench: Benchmark) -> bool:
    """Whether targets are standardized, by sums that all clients send."""
    return bench.task == REGRESSION.name and data.scale != "none"


def moments_of(values: np.ndarray, features: int) -> Moments:
    """The moments of the first features (or channels) of values [N, J, ...]."""
    numbers = values[:, :features].astype(np.float64)
    axes = (0, *range(2, numbers.ndim))
    counts = np.isfinite(numbers).sum(axes)
    sums = np.nansum(numbers, axes)
    squares = np.nansum(numbers**2, axes)
    return Moments(
        tuple(counts.tolist()),
        tuple(sums.tolist()),
        tuple(squares.tolist()),
    )


def scale_of(moments: Iterable[Moments]) -> Scale:
    """The scale by the moments of all clients, which are added up in their order."""
    mean, variance = _mean_and_variance(moments)
    varies = _varies(mean, variance)
    std = np.sqrt(np.where(varies, variance, 1.0))
    return Scale(tuple(mean.tolist()), tuple(std.tolist()))


def _mean_and_variance(moments: Iterable[Moments]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance [J] of the values of all clients together; 0 for a feature without any value."""
    together = list(moments)
    counts = np.sum([each.counts for each in together], axis=0)
    sums = np.sum([each.sums for each in together], axis=0)
    squares = np.sum([each.squares for each in together], axis=0)
    count = np.maximum(counts, 1)
    mean = sums / count
    return mean, squares / count - mean**2


def _varies(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Which features vary at all, bool [J]."""
    return variance > TINY * np.maximum(mean**2, SMALLEST)


def feature_notes(data: DataSettings, bench: Benchmark, moments: Mapping[str, Moments]) -> list[str]:
    """Sentences on features of which a client has no value, and on those that do not vary, which are not scaled.

    moments: those of each client that sends some
    """
    count = summed_features(data, bench)
    if not count or not moments:
        return []
    names = bench.features[:count] or [f"feature {place}" for place in range(count)]
    is_anywhere = np.any([each.counts for each in moments.values()], axis=0)
    notes = []
    for client, of_client in moments.items():
        is_lacking = is_anywhere & ~np.array(of_client.counts, bool)
        lacking = _chosen(names, is_lacking)
        if lacking:
            notes.append(f"{client} has no value of {', '.join(lacking)}; they become the mean of the other sources")
    mean, variance = _mean_and_variance(moments.values())
    unscaled = _chosen(names, ~_varies(mean, variance))
    if unscaled:
        notes.append(
            f"the sources have no value of {joined_names(unscaled)}, or one alone, so that these are not scaled: other "
            "values of another domain enter the model as they are; leave them out of the features"
        )
    return notes


def _chosen(names: Sequence[str], mask: np.ndarray) -> list[str]:
    """The names of features that a mask [J'] marks, of which those of targets come last and have no name."""
    return [name for name, is_marked in zip(names, mask) if is_marked]


def scaled_by_site(values: np.ndarray, rows: np.ndarray, bench: Benchmark) -> np.ndarray:
    """Values of a domain [N, ...], standardized by those of some of its rows."""
    moments = moments_of(values[rows], bench.numeric)
    return scale_of([moments]).apply(values)


def refuse_empty_cells(data: DataSettings, bench: Benchmark, domain: str, values: np.ndarray) -> None:
    """Raises UserError for missing values [N, ...] of a domain that nothing replaces, as with data.scale = "none"."""
    if not bench.shape or scale_rule(data, bench) != "none":
        return
    if not np.isfinite(values).all():
        raise UserError(
            f"{domain}: some cells are empty, and data.scale = 'none' gives them no value; use 'federated' "
            "or 'site', or data.missing = 'drop'"
        )
