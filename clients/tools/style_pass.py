"""One training pass with styles: which samples a batch gets in addition, in which styles, and who is whose partner."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from clients.local_data import on_device
from fedsim.models.inserts.style_exploration import (
    FEWEST,
    StyleExploration,
    explored_styles,
    mixed,
    moments,
    shared_styles,
)


def lone_classes(labels: np.ndarray) -> np.ndarray:
    """The classes with exactly one sample, ascending."""
    classes, counts = np.unique(labels, return_counts=True)
    return classes[counts == 1]


def drawn_classes(labels: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """The classes [count] of samples that are to be added, so that the classes in `labels` become equally frequent.

    Each time the classes with the fewest samples are drawn, all of them if they fit, otherwise as many as fit at
    random; a drawn class counts as one sample more.
    """
    classes, counts = np.unique(labels, return_counts=True)
    drawn: list[np.ndarray] = []
    while count > 0:
        fewest = np.flatnonzero(counts == counts.min())
        fewest = fewest if len(fewest) <= count else rng.choice(fewest, count, replace=False)
        counts[fewest] += 1
        count -= len(fewest)
        drawn.append(classes[fewest])
    return np.concatenate(drawn) if drawn else classes[:0]


def picked_rows(labels: np.ndarray, classes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random row of `labels` for each of these classes, which all occur there."""
    order = np.argsort(labels, kind="stable")
    first = np.searchsorted(labels[order], classes, side="left")
    count = np.searchsorted(labels[order], classes, side="right") - first
    return order[first + rng.integers(count)]


def partner_rows(labels: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The row of every sample's partner: the next one of its class in batch order, after the last one the first.

    A class with one sample gets the row len(labels) + i of the sample i with its class in `other`, or its own row if
    there is none. `other` is ascending and has at most one of a class.
    """
    order = np.argsort(labels, kind="stable")
    follows = np.roll(order, -1)
    _, first, counts = np.unique(labels[order], return_index=True, return_counts=True)
    follows[first + counts - 1] = order[first]
    rows = np.empty_like(order)
    rows[order] = follows
    alone = order[first[counts == 1]]
    shared = alone[np.isin(labels[alone], other)]
    rows[shared] = len(labels) + np.searchsorted(other, labels[shared])
    return rows


@dataclass
class Balanced:
    """What the class-balanced batch gave in the present pass.

    labels: its classes, ascending. maps: the output of each stage. queries: the highlighter's mean queries [P, 30]
    """

    labels: np.ndarray
    maps: dict[int, Tensor] = field(default_factory=dict)
    queries: Tensor | None = None

    def note_map(self, stage: int, x: Tensor) -> Tensor:
        """Keeps the output of a stage, and changes nothing."""
        self.maps[stage] = x
        return x

    def note_queries(self, queries: Tensor) -> Tensor:
        """Keeps the queries, and makes everybody its own partner."""
        self.queries = queries
        return queries


class StylePass:
    """What one training pass does after each stage: `acts(stage, x)`, and its partners.

    labels: the classes of the rows, on the host; they grow with the batch. active: the stages that explore, drawn when
    the pass is made. foreign: another client's style [4, C_1] when this batch shares, otherwise None

    Draws come from `rng`, so that the host never waits for the device, and the streams of other parts stay as they are.
    """

    def __init__(
        self,
        part: StyleExploration,
        stages: list[int],
        labels: np.ndarray,
        foreign: Tensor | None,
        rng: np.random.Generator,
    ) -> None:
        self.part, self.labels, self.foreign, self.rng = part, labels, foreign, rng
        self.active = [stage for stage in stages if part.p and rng.random() < part.p]
        self.enlarged = False
        self.balanced = Balanced(labels[:0])

    def acts(self, stage: int, x: Tensor) -> Tensor:
        """The output x of a stage with other styles, and at the first active stage with more samples."""
        if x.shape[2] * x.shape[3] < 2:
            return x
        if stage == 1 and self.foreign is not None and len(x) >= FEWEST:
            x = self._shared(x)
        if stage not in self.active:
            return x
        return self._mixed(*(self._enlarged(stage, x) if not self.enlarged else _contents(x)))

    def partners(self, queries: Tensor) -> Tensor:
        """The query [N, 30] of every sample's partner."""
        other = self.balanced.queries
        rows = partner_rows(self.labels, self.balanced.labels)
        return (queries if other is None else torch.cat([queries, other]))[on_device(rows, queries.device)]

    def _shared(self, x: Tensor) -> Tensor:
        """Half of the batch with another client's styles."""
        half = len(x) - len(x) // 2
        gumbel = self.rng.gumbel(size=(half, len(x)))
        normal = self.rng.standard_normal((2, len(x), x.shape[1]))
        first = int(self.rng.integers(len(x)))
        assert self.foreign is not None
        return shared_styles(x, self.foreign, first, on(gumbel, x), on(normal, x), self.part.official)

    def _enlarged(self, stage: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Contents and styles of the batch, of second samples of lone classes, and of samples drawn from all these."""
        self.enlarged = True
        total = self.part.additions or len(x)
        balanced = self.balanced
        second = np.intersect1d(lone_classes(self.labels), balanced.labels)
        second = second if len(second) <= total else self.rng.choice(second, total, replace=False)
        if len(second):
            rows = np.searchsorted(balanced.labels, second)
            x = torch.cat([x, balanced.maps[stage][on_device(rows, x.device)].to(x.dtype)])
        labels = np.concatenate([self.labels, second])
        drawn = drawn_classes(labels, total - len(second), self.rng)
        picked = on_device(picked_rows(labels, drawn, self.rng), x.device)
        self.labels = np.concatenate([labels, drawn])
        content, mean, std = _contents(x)
        styles = explored_styles(mean, std, picked, self.part.alpha, clamp=not self.part.official)
        return torch.cat([content, content[picked]]), *styles

    def _mixed(self, content: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """The contents with styles that are mixed within the batch."""
        lam = on(self.rng.beta(self.part.beta, self.part.beta, size=(len(content), 1, 1, 1)), content)
        return mixed(content, mean, std, lam, on_device(self.rng.permutation(len(content)), content.device))


def _contents(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mu)/sigma with its gradient, and mu and sigma without."""
    mean, std = moments(x)
    return (x - mean) / std, mean.detach(), std.detach()


def on(values: np.ndarray, x: Tensor) -> Tensor:
    """Drawn values on the device and with the type of x."""
    return on_device(values.astype(np.float32), x.device).to(x.dtype)
