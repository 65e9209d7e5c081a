"""A client's examples as tensors on its device: selected, augmented and normalized batch by batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clients.batch import Batch, Moment, Transfer
from fedsim.data import ClientData
from fedsim.data.augment import NOTHING, Augmentation, Scaler, Transforms
from fedsim.data.scaling import Moments, Scale, moments_of
from fedsim.models.tasks import CLASSIFIES, TaskRules

MOST_STANDARDIZED = 2**26  # bytes of a set of which a standardized copy is kept
GPU_SHARE = 4  # a set of images is kept on a GPU that has this many times its size free; otherwise it stays on the host


class LocalData:
    """The training and validation examples of one client; positions count from 0 within each split.

    task: the kind of labels, and how they are learned
    held: the training images of this client, or of each client whose data are pooled
    domains: the domain of every training example, int64 [n]; all are 0 for a client of one domain
    labels: the labels of a batch: classes int64 [N], masks uint8 [N,Q,H,W], or other targets float32 [N,Q]
    at_test: what normalized images go through in evaluation (`Augment.at_test`); None: nothing
    """

    at_test: Callable[[Tensor], Tensor] | None = None
    _standardized: tuple[Scale | None, Tensor] | None = None  # tensors that are no images, and their scale

    def __init__(
        self, data: ClientData, transforms: Transforms, device: torch.device, task: TaskRules = CLASSIFIES
    ) -> None:
        self.client = data.client
        self.task = task
        self.shifted = 0.0  # the share of each batch whose labels an attacker shifts (run.attackers)
        self.has_masks = task.maps and data.masks is not None
        self.classes = len(data.classes)
        self.class_counts = data.class_counts()
        self.transforms = transforms
        self.device = device
        positions = np.concatenate([data.train, data.validation, data.test])
        self.examples = len(data.train)
        self.held = data.held or (self.examples,)
        self.validation = np.arange(len(data.train), len(data.train) + len(data.validation))
        self.test = np.arange(len(data.train) + len(data.validation), len(positions))
        self._divide_by_domain(data)
        self.images = kept_near(torch.from_numpy(np.ascontiguousarray(data.images[positions])), device)
        truth = data.labels if data.masks is None else data.masks
        self.labels = torch.from_numpy(np.ascontiguousarray(truth[positions])).to(device)
        knows_sizes = data.sizes is not None and isinstance(transforms.augment, Augmentation)
        self.sizes = torch.from_numpy(data.sizes[positions]) if data.sizes is not None and knows_sizes else None

    def _divide_by_domain(self, data: ClientData) -> None:
        """Notes the domain of each training image, and the validation and test images of each domain."""
        self.domains = data.domain_index[data.train]
        self.validation_by_domain = self._by_domain(data, data.validation, self.validation)
        self.test_by_domain = self._by_domain(data, data.test, self.test)

    @staticmethod
    def _by_domain(data: ClientData, indices: np.ndarray, positions: np.ndarray) -> list[np.ndarray]:
        """The positions of these images for each of their domains."""
        domains = data.domain_index[indices]
        if not data.held:  # the mixed domains of a client are validated together
            domains = np.zeros_like(domains)
        return [positions[domains == domain] for domain in np.unique(domains)]

    def raw(self, positions: np.ndarray) -> Tensor:
        """Images in [0, 1], float [B, C, H, W], without any change; tensors that are no images are standardized."""
        return self._raw(on_device(positions, self.images.device))

    def _raw(self, index: Tensor) -> Tensor:
        """The same for positions that are a tensor on the device of the set."""
        read = self.transforms.read
        if not isinstance(read, Scaler) or self.images.nbytes > MOST_STANDARDIZED:
            return read(fetched(self.images.index_select(0, index), self.device))
        if self._standardized is None or self._standardized[0] is not read.scale:
            self._standardized = read.scale, read(self.images)  # number by number, as a batch would be
        return fetched(self._standardized[1].index_select(0, index), self.device)

    def moments(self, features: int, targets: bool) -> Moments:
        """The sums of the first features of the training examples, and of their `targets`, before any is scaled."""
        moments = moments_of(self.images[: self.examples].cpu().numpy(), features)
        return moments.joined(moments_of(self.labels[: self.examples].cpu().numpy(), 1)) if targets else moments

    def batch(self, items: np.ndarray, transfer: Transfer | None = None, moment: Moment = "raw") -> Batch:
        """A training batch after augmentation and normalization, with the transfer (a style, ...) at its moment.

        Item `copy * n + position` is version `copy` of a training example, for a transfer that makes several versions
        of each. Other versions of the images that the batch prepares or normalizes get the draws of the first ones.
        """
        positions = items % self.examples
        index = on_device(positions, self.images.device)
        raw = self._raw(index)

        def moved(images: Tensor, now: Moment) -> Tensor:
            return images if transfer is None or moment != now else transfer(images, items)

        raw = moved(raw, "raw")
        draws = torch.get_rng_state()

        own_sizes = () if self.sizes is None else (self.sizes[torch.from_numpy(positions)],)

        def augment(images: Tensor) -> Tensor:
            return moved(self.transforms.augment(images, *own_sizes), "augmented")

        labels = self._labels_of_batch(index)
        if self.has_masks:  # masks get the geometric changes of their images
            whole: Any = self.transforms.augment
            augmented, labels = whole.with_masks(raw, labels, *own_sizes)
            augmented = moved(augmented, "augmented")
        else:
            augmented = augment(raw)
        last_draws = torch.get_rng_state() if moment == "normalized" else draws

        def normalize(images: Tensor) -> Tensor:
            if moment != "normalized":
                return self.normalize(images)
            with drawn_again(last_draws):
                return moved(self.normalize(images), "normalized")

        def prepare(images: Tensor) -> Tensor:
            with drawn_again(draws):
                augmented = augment(images)
            return normalize(augmented)

        images = moved(self.normalize(augmented), "normalized")
        return Batch(images, labels, raw, prepare, augmented, normalize, positions=positions)

    def _labels_of_batch(self, index: Tensor) -> Tensor:
        """The labels of training examples, as an attacker gives them if this client is one."""
        labels = self._labels(index)
        return shifted_labels(labels, self.shifted, self.classes) if self.shifted else labels

    def _labels(self, index: Tensor) -> Tensor:
        """The labels of positions on the device of the images, which may be the host where that of labels is a GPU."""
        return self.labels.index_select(0, index.to(self.labels.device, non_blocking=True))

    @property
    def is_plain(self) -> bool:
        """Whether a batch without transfer draws nothing and is selected from images that lie next to their labels."""
        return self.transforms.augment == NOTHING and not self.shifted and self.images.device == self.labels.device

    def normalize(self, images: Tensor) -> Tensor:
        """The network's input for images in [0, 1]."""
        images = self.transforms.normalize(images)
        on_gpu = self.device.type == "cuda" and images.dim() == 4
        return images.contiguous(memory_format=torch.channels_last) if on_gpu else images

    def evaluation(self, positions: np.ndarray, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs (images, labels) without augmentation, in large batches."""
        for start in range(0, len(positions), size):
            index = on_device(positions[start : start + size], self.images.device)
            images = self.transforms.normalize(self._raw(index))
            shown = images if self.at_test is None else self.at_test(images)
            yield shown, self._labels(index)

    def training_positions(self) -> np.ndarray:
        """The positions of the training split."""
        return np.arange(self.examples)


def plain_batches(data: Sequence[LocalData], items: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Images [R, B, ...] and labels [R, B, ...] of equally long batches of R clients, as `LocalData.batch` has them.

    The data of all clients are plain, and have the same transforms. What is done to images is done to all at once.
    """
    positions = [rows % each.examples for each, rows in zip(data, items)]
    index = on_device(np.concatenate(positions), data[0].images.device).split(len(items[0]))
    transforms = data[0].transforms
    if isinstance(transforms.read, Scaler):  # each client may have a standardized copy
        images = torch.stack([each._raw(rows) for each, rows in zip(data, index)]).flatten(0, 1)
    else:
        images = torch.stack([each.images.index_select(0, rows) for each, rows in zip(data, index)])
        images = transforms.read(images.flatten(0, 1))
    labels = torch.stack([each.labels.index_select(0, rows) for each, rows in zip(data, index)])
    return transforms.normalize(images).unflatten(0, labels.shape[:2]), labels


@contextmanager
def drawn_again(draws: Tensor) -> Iterator[None]:
    """Lets torch's generator repeat what it drew from a state on; afterwards it is as it was before."""
    with torch.random.fork_rng(devices=()):
        torch.set_rng_state(draws)
        yield


def shifted_labels(labels: Tensor, share: float, classes: int) -> Tensor:
    """The labels [B] of a batch, of which the first int(share B) are y + 1 mod M."""
    changed = labels.clone()
    first = int(share * len(labels))
    changed[:first] = (changed[:first] + 1) % classes
    return changed


def on_device(positions: np.ndarray, device: torch.device) -> Tensor:
    """Positions as a tensor on the device. The host does not wait for a GPU: the copy starts from pinned memory."""
    index = torch.from_numpy(positions)
    return (index.pin_memory() if device.type == "cuda" else index).to(device, non_blocking=True)


def kept_near(images: Tensor, device: torch.device) -> Tensor:
    """A set of images on the device, or on the host where it would take too much of what is free on a GPU."""
    if device.type == "cuda" and images.nbytes * GPU_SHARE > torch.cuda.mem_get_info(device)[0]:
        return images
    return images.to(device)


def fetched(images: Tensor, device: torch.device) -> Tensor:
    """A batch of a set on the device. From the host it goes there while the device computes with the one before."""
    return images if images.device == device else images.pin_memory().to(device, non_blocking=True)
