"""A data set with any number of images, for benchmarks with many clients: the digits of every domain are repeated.

Use `data.dataset = "many_digits:ManyDigits"` with this folder in the search path. The environment variable MANY_DIGITS
is the number of images of a domain. Image i is image i mod 1,000 of the domain, so that the data set takes the same
memory at every size.
"""

import os
from dataclasses import replace
from functools import lru_cache

import numpy as np

from fedsim.data.catalog import BENCHMARKS
from fedsim.data.digits import Digits, digits_domain


class Repeated:
    """An array of images that behaves like a longer array with repeated images; indexing gives a normal array."""

    def __init__(self, images: np.ndarray, count: int) -> None:
        self._images, self._count = images, count
        self.shape, self.ndim, self.dtype = (count, *images.shape[1:]), images.ndim, images.dtype

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: np.ndarray) -> np.ndarray:
        return self._images[np.asarray(index) % len(self._images)]


class ManyDigits(Digits):
    """Rotated Digits with each image many times."""

    benchmark = replace(BENCHMARKS["digits"], name="many-digits", title="Digits, repeated", counts=None)

    def images(self, domain: str, apart: bool = False) -> tuple[Repeated | np.ndarray, np.ndarray]:
        """The images of a domain, in the wanted number."""
        images, labels = super().images(domain, apart)
        if apart:
            return images, labels
        wanted = int(os.environ.get("MANY_DIGITS", "1000"))
        return Repeated(images, wanted), many_labels(int(domain.removeprefix("rot")), self.data.seed_of_splits, wanted)


@lru_cache(maxsize=8)
def many_labels(angle: int, seed: int, wanted: int) -> np.ndarray:
    """Labels of the images."""
    return np.resize(digits_domain(angle, 8, seed)[1], wanted)
