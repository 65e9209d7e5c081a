"""What one client holds: images, labels, and the images for training and for validation."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

Split = tuple[np.ndarray, np.ndarray]  # indices of the images that train, and of those that validate
FullSplit = tuple[np.ndarray, np.ndarray, np.ndarray]  # and of those that `data.source_test` tests


@dataclass(frozen=True, eq=False)
class ClientData:
    """One client's data: the images of its whole domain, and the indices that are its own.

    images: uint8 [N,C,H,W], often a read-only memory map
    labels: int64 [N]
    train, validation, test: int64 indices into both, disjoint; test is empty without data.source_test
    domain_index: int64 [N], the position of each image's domain in `domains` (pooled data has several)
    sizes: int32 [N,2], heights and widths of the images before they were resized to squares; None when all were square
    masks: uint8 [N,Q,H,W], for Q structures, where the data set has masks; other targets than classes are float32 [N,Q]
    held: the training images of each client in the data of all together, where domains are validated one by one

    A client of mixed domains (data.mix) has its own images only, domain after domain.
    """

    client: str
    images: np.ndarray
    labels: np.ndarray
    train: np.ndarray
    validation: np.ndarray
    classes: tuple[str, ...]
    domains: tuple[str, ...]
    domain_index: np.ndarray
    sizes: np.ndarray | None = None
    masks: np.ndarray | None = None
    held: tuple[int, ...] = ()
    test: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def examples(self) -> int:
        """Number of training images: the client's weight in FedAvg."""
        return len(self.train)

    def class_counts(self) -> np.ndarray:
        """Training images of each class, int64 [classes]."""
        labels = self.labels[self.train]
        return np.bincount(labels[labels >= 0], minlength=len(self.classes))


def domain_of(client: str) -> str:
    """The domain of a client: "photo" for "photo" and for "photo/3"."""
    return client.partition("/")[0]


def clients_of(domain: str, count: int) -> list[str]:
    """Names of a domain's clients: that of the domain for one, else "photo/0", "photo/1", ..."""
    if count == 1:
        return [domain]
    return [f"{domain}/{index}" for index in range(count)]


def unless_square(sizes: np.ndarray | None) -> np.ndarray | None:
    """Heights and widths, or None when all images are square."""
    if sizes is None:
        return None
    is_square = sizes[:, 0] == sizes[:, 1]
    return None if is_square.all() else sizes


def entries_at(values: np.ndarray | None, indices: np.ndarray) -> np.ndarray | None:
    """Returns the entries [n, ...] of values [N, ...] at some indices int64 [n], or None where there are no values."""
    return None if values is None else values[indices]


def joined(
    client: str,
    parts: Sequence[ClientData],
    clients: Sequence[ClientData],
    held: tuple[int, ...] = (),
) -> ClientData:
    """The images of several domains one after the other, of a part for each, with what the `clients` own of them."""
    domains = tuple(part.domains[0] for part in parts)
    counts = [len(part.labels) for part in parts]
    ends = np.cumsum(counts)
    start_of = dict(zip(domains, ends - counts))
    starts = [start_of[each.domains[0]] for each in clients]
    numbers = np.arange(len(parts), dtype=np.int64)
    masks = [part.masks for part in parts if part.masks is not None]
    return ClientData(
        client,
        images=np.concatenate([part.images for part in parts]),
        labels=np.concatenate([part.labels for part in parts]),
        train=_joined_indices([each.train for each in clients], starts),
        validation=_joined_indices([each.validation for each in clients], starts),
        classes=parts[0].classes,
        domains=domains,
        domain_index=np.repeat(numbers, counts),
        sizes=_joined_sizes(parts),
        masks=np.concatenate(masks) if masks else None,
        held=held,
        test=_joined_indices([each.test for each in clients], starts),
    )


def _joined_indices(parts: Sequence[np.ndarray], starts: Sequence[int]) -> np.ndarray:
    """Indices of images, each part within its own domain, as indices into all images; a domain begins at its start."""
    return np.concatenate([indices + start for indices, start in zip(parts, starts)])


def _joined_sizes(parts: Sequence[ClientData]) -> np.ndarray | None:
    """The sizes of several domains. The images of a domain in which all are square get a square."""
    if all(part.sizes is None for part in parts):
        return None
    sizes = []
    for part in parts:
        squares = np.ones((len(part.labels), 2), np.int32)
        sizes.append(squares if part.sizes is None else part.sizes)
    return np.concatenate(sizes)
