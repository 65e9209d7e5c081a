"""Rotated MNIST in CSAC's and DomainBed's variants and ColoredMNIST, from MNIST's own files (never downloaded here)."""

from functools import lru_cache
from pathlib import Path

import numpy as np

from fedsim.common.errors import UserError
from fedsim.data.catalog import ANGLES
from fedsim.data.digits import PER_CLASS, colored, resize, rotate, some_of_each
from fedsim.data.reader import Images, Reader, content_hash
from fedsim.data.splits import seed_hash, shuffled
from fedsim.settings import data_root


@lru_cache(maxsize=2)
def _mnist(root: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Images uint8 [N,1,28,28] of the training and then the test file, labels int64 [N], size of the training part."""
    from torchvision.datasets import MNIST  # takes seconds to import, and `find` does not need it

    folder = _folder(root)
    try:
        parts = [MNIST(str(folder), train=train, download=False) for train in (True, False)]
    except (RuntimeError, OSError, ValueError, AssertionError) as error:
        reason = str(error).partition(". ")[0]  # without torchvision's advice to download
        raise _unreadable(folder, reason) from None
    images = np.concatenate([part.data.numpy() for part in parts])[:, None]
    labels = np.concatenate([part.targets.numpy() for part in parts]).astype(np.int64)
    return images, labels, len(parts[0])


def _folder(root: Path) -> Path:
    """The folder that holds MNIST/raw; the data root may also be MNIST itself."""
    return root.parent if root.name == "MNIST" and not (root / "MNIST").is_dir() else root


def _unreadable(folder: Path, reason: str) -> UserError:
    return UserError(
        f"Rotated MNIST: cannot read MNIST's files in {folder / 'MNIST' / 'raw'} "
        f"({reason}); put train-images-idx3-ubyte, train-labels-idx1-ubyte and the "
        "two t10k files there, or set data.root or $FEDSIM_DATA"
    )


@lru_cache(maxsize=12)
def mnist_domain(
    root: Path,
    variant: str,
    split_seed: int,
    angle: int,
    image_size: int,
) -> Images:
    """Domain M<angle>: images uint8 [N,1,s,s] and labels int64 [N].

    csac: 100 training images a class, drawn by `split_seed`, the SAME in every domain, rotated clockwise.
    domainbed: all images shuffled by `split_seed` and dealt round-robin to disjoint domains, rotated counter-clockwise.
    DomainBed draws its shuffle from torch's generator; here it comes from a named stream, so the deal differs.
    Raises UserError when files are missing or a class has fewer than 100 images (csac).
    """
    images, labels, train = _mnist(root)
    seed = seed_hash(split_seed, "rotated-mnist")
    if variant == "domainbed":
        order = shuffled(len(labels), seed)
        chosen = order[ANGLES.index(angle) :: len(ANGLES)]
        clockwise = -angle
    else:
        try:
            chosen = some_of_each(labels[:train], PER_CLASS, seed)
        except UserError as error:
            raise UserError(f"Rotated MNIST (csac), MNIST's training file: {error}") from None
        clockwise = angle
    scaled = resize(images[chosen], image_size)
    return rotate(scaled, clockwise), labels[chosen]


class RotatedMNIST(Reader):
    """Reads Rotated MNIST."""

    def find(self) -> None:
        """MNIST's folder must be there."""
        folder = _folder(data_root(self.data).resolve())
        if not (folder / "MNIST").is_dir():
            raise _unreadable(folder, "no such folder")

    def images(self, domain: str, apart: bool = False) -> Images:
        """Images and labels of domain M<angle>."""
        data = self.data
        return mnist_domain(
            data_root(data).resolve(),
            data.variant,
            data.seed_of_splits,
            angle=int(domain.removeprefix("M")),
            image_size=data.image_size,
        )

    def fingerprint(self, domain: str) -> str:
        """Hash of MNIST's images and labels, whatever files they came in."""
        images, labels, train = _mnist(data_root(self.data).resolve())
        return content_hash(images.tobytes(), labels.tobytes(), str(train).encode())


class ColoredMNIST(RotatedMNIST):
    """Reads coloured MNIST, from the same files as Rotated MNIST."""

    def images(self, domain: str, apart: bool = False) -> Images:
        """Images and labels of domain agree<percent>."""
        grey, digits, _ = _mnist(data_root(self.data).resolve())
        scaled = resize(grey, self.data.image_size)
        agree = int(domain.removeprefix("agree"))
        return colored(scaled, digits, agree, self.data.seed_of_splits)
