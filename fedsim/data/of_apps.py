"""Datasets that Python code gives as objects: those of a Flower app's client, or of all domains to `fedsim.run`.

A process holds what it was given (`hold`), and the reader of this data set finds it there. The settings of such a run
name everything else: `data.domains`, `data.classes` and the shape of an example. A Flower app's server has names and
shapes alone, because each client reads its own data.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedsim.common.errors import UserError
from fedsim.common.values import JsonTable
from fedsim.data.reader import Images, Reader, content_hash
from fedsim.data.row import Benchmark
from fedsim.data.targets import targets_or_classes
from fedsim.data.tensor_sets import read_tensors
from fedsim.settings import DataSettings
from fedsim.settings.data import SMALLEST_SIZE

MODULE = __name__
DATASET = f"{MODULE}:DATA"  # as data.dataset names it before the shape is known


@dataclass(frozen=True, eq=False)
class Held:
    """What this process has of one domain.

    values: uint8 [N,C,s,s] for images, otherwise float32 [N,...]
    labels: int64 [N], or targets float32 [N,Q] of a task without classes
    train, validation: int64 indices into both, disjoint
    """

    values: np.ndarray
    labels: np.ndarray
    train: np.ndarray
    validation: np.ndarray

    @property
    def are_images(self) -> bool:
        """Whether the values are images of 256 levels."""
        return self.values.dtype == np.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an example."""
        return self.values.shape[1:]

    def in_form(self, are_images: bool) -> "Held":
        """The same as float tensors, where the other domains are no images."""
        if are_images or not self.are_images:
            return self
        values = self.values.astype(np.float32) / 255
        return replace(self, values=values)

    def counted_from(self, first: int) -> "Held":
        """The same with labels from 0, where they count from `first`."""
        if not first:
            return self
        return replace(self, labels=self.labels - first)


HERE: dict[str, Held] = {}  # by domain


def hold(domain: str, training: Any, validation: Any, task: str = "") -> Held:
    """Reads the Datasets of (tensor, class) of a domain, either of which may be None, and keeps them in this process.

    task: `data.task`; without classes the Datasets are of (tensor, number) or (tensor, labels)

    Raises UserError for items that are no such pairs, and for shapes that differ.
    """
    datasets = {"training": training, "validation": validation}
    parts = {}
    for part, dataset in datasets.items():
        if dataset is not None:
            parts[part] = read_tensors(dataset, f"{domain}, {part}", task)
    if not parts:
        raise UserError(f"{domain}: there is no Dataset; give one for training and one for validation")
    shapes = [list(tensors.values.shape[1:]) for tensors in parts.values()]
    if shapes[0] != shapes[-1]:
        raise UserError(f"{domain}: training has the shape {shapes[0]}, validation {shapes[1]}")
    values = np.concatenate([tensors.values for tensors in parts.values()])
    labels = np.concatenate([tensors.labels for tensors in parts.values()])
    count = 0
    if "training" in parts:
        count = len(parts["training"].labels)
    HERE[domain] = Held(
        values=in_levels(values),
        labels=labels,
        train=np.arange(count),
        validation=np.arange(count, len(labels)),
    )
    return HERE[domain]


def in_levels(values: np.ndarray) -> np.ndarray:
    """Images uint8 of values in [0, 1], where they are square images of 256 levels; otherwise the values themselves.

    What torchvision's ToTensor gives is such an image. After a normalization it is none.
    """
    if values.ndim != 4:
        return values
    _, channels, height, width = values.shape
    is_image = channels in (1, 3) and height == width >= SMALLEST_SIZE
    if not is_image or values.min() < 0 or values.max() > 1:
        return values
    levels = np.rint(values * 255)
    if not np.allclose(levels / 255, values, rtol=0, atol=1e-6):
        return values
    return levels.astype(np.uint8)


def settings_for(shape: tuple[int, ...], are_images: bool) -> JsonTable:
    """The settings of [data] for examples of this shape."""
    if not are_images:
        return {"dataset": f"{MODULE}:TENSORS", "shape": list(shape)}
    row = "GREY" if shape[0] == 1 else "COLOUR"
    return {"dataset": f"{MODULE}:{row}", "image_size": shape[-1]}


class AppReader(Reader):
    """Reads what this process holds; UserError for a domain of another client."""

    def images(self, domain: str, apart: bool = False) -> Images:
        """The values and labels of a domain."""
        held = self._held(domain)
        labels = held.labels
        if labels.ndim > 1:  # targets; all examples are of one stratum
            labels = np.zeros(len(labels), np.int64)
        return held.values, labels

    def masks(self, domain: str, apart: bool = False) -> np.ndarray | None:
        """The targets float32 [N, Q] of a domain; None where its examples have classes."""
        labels = self._held(domain).labels
        return labels if labels.ndim > 1 else None

    def listed(self, domain: str, part: str) -> np.ndarray | None:
        """The indices of training or validation; None for a domain without."""
        held = self._held(domain)
        parts = {"train": held.train, "validation": held.validation}
        indices = parts.get(part)
        if indices is None or not len(indices):
            return None
        return indices

    def fingerprint(self, domain: str) -> str:
        """A hash of the values, labels and split."""
        held = self._held(domain)
        shape = str(held.values.shape)
        return content_hash(
            shape.encode(),
            held.values.tobytes(),
            held.labels.tobytes(),
            held.train.tobytes(),
            held.validation.tobytes(),
        )

    def _held(self, domain: str) -> Held:
        if domain not in HERE:
            raise UserError(
                f"the data of {domain!r} are not in this process: a client of a Flower app alone has its "
                "own, and Datasets that Python code gives must be given again"
            )
        return HERE[domain]


def discover(data: DataSettings, row: Benchmark) -> Benchmark:
    """The row with the domains, classes and, of tensors, the shape of the settings."""
    return replace(
        row,
        domains=tuple(sorted(data.domains)),
        **targets_or_classes(data, tuple(data.classes)),
        shape=tuple(data.shape),
        numeric=data.shape[0] if data.shape else 0,
    )


DATA = Benchmark(
    name="app",
    title="Data of a Flower app",
    domains=(),
    classes=(),
    channels=3,
    source="the app's own clients",
    note="fedsim.strategy names the domains, once the clients have said who they are",
    reader=f"{MODULE}:AppReader",
    discover=f"{MODULE}:discover",
    takes_targets=True,
)
GREY = replace(DATA, channels=1)
COLOUR = DATA
TENSORS = replace(DATA, images=False)
