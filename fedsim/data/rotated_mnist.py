"""Rotated MNIST in CSAC's and DomainBed's variants, from MNIST's own files (never downloaded here)."""

from functools import lru_cache
from pathlib import Path

import numpy as np
from torchvision.datasets import MNIST

from fedsim.data.benchmarks import ANGLES
from fedsim.data.digits import resize, rotate
from fedsim.data.splits import seed_hash, shuffled
from fedsim.errors import UserError

PER_CLASS = 100


@lru_cache(maxsize=2)
def _mnist(root: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Images uint8 [N,1,28,28] of the training and then the test file, labels int64 [N], size of the training part."""
    folder = root.parent if root.name == "MNIST" and not (root / "MNIST").is_dir() else root
    try:
        parts = [MNIST(str(folder), train=train, download=False) for train in (True, False)]
    except (RuntimeError, OSError, ValueError, AssertionError) as error:
        reason = str(error).partition(". ")[0]  # without torchvision's advice to download
        raise UserError(
            f"Rotated MNIST: cannot read MNIST's files in {folder / 'MNIST' / 'raw'} "
            f"({reason}); put train-images-idx3-ubyte, train-labels-idx1-ubyte and the "
            "two t10k files there, or set data.root or $FEDSIM_DATA"
        ) from None
    images = np.concatenate([part.data.numpy() for part in parts])[:, None]
    labels = np.concatenate([part.targets.numpy() for part in parts]).astype(np.int64)
    return images, labels, len(parts[0])


@lru_cache(maxsize=12)
def mnist_domain(
    root: Path, variant: str, split_seed: int, angle: int, image_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Domain M<angle>: images uint8 [N,1,s,s] and labels int64 [N].

    csac: 100 training images a class, drawn by `split_seed`, the SAME in every domain, rotated clockwise.
    domainbed: all images shuffled by `split_seed` and dealt round-robin to disjoint domains, rotated counter-clockwise.
    DomainBed draws its shuffle from torch's generator; here it comes from a named stream, so the deal differs.
    Raises UserError when files are missing or a class has fewer than 100 images (csac).
    """
    images, labels, train = _mnist(root)
    if variant == "domainbed":
        order = shuffled(len(labels), seed_hash(split_seed, "rotated-mnist"))
        chosen, clockwise = order[ANGLES.index(angle) :: len(ANGLES)], -angle
    else:
        chosen, clockwise = _hundred_a_class(labels[:train], split_seed), angle
    return rotate(resize(images[chosen], image_size), clockwise), labels[chosen]


def _hundred_a_class(labels: np.ndarray, split_seed: int) -> np.ndarray:
    order = shuffled(len(labels), seed_hash(split_seed, "rotated-mnist"))
    classes = [order[labels[order] == label][:PER_CLASS] for label in range(10)]
    short = [label for label, members in enumerate(classes) if len(members) < PER_CLASS]
    if short:
        raise UserError(
            f"Rotated MNIST (csac): digit {short[0]} has {len(classes[short[0]])} of {PER_CLASS} images "
            "needed in MNIST's training file; use the complete file"
        )
    return np.sort(np.concatenate(classes))
