"""A data set with as many images as a benchmark of many clients wants: the digits of every domain over and over again.

`data.dataset = "many_digits:ManyDigits"` with this folder in the search path. `MANY_DIGITS` is the number of images a
domain has. Image i is image i mod 1,000 of the domain, so that the data set takes the same memory whatever its size.
"""

import os
from dataclasses import replace
from functools import lru_cache

import numpy as np

from fedsim.data.benchmarks import BENCHMARKS
from fedsim.data.digits import Digits, digits_domain


class Repeated:
    """An array of images that stands for a longer one; what is taken out of it is an ordinary array."""

    def __init__(self, images: np.ndarray, count: int) -> None:
        self._images, self._count = images, count
        self.shape, self.dtype = (count, *images.shape[1:]), images.dtype

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: np.ndarray) -> np.ndarray:
        return self._images[np.asarray(index) % len(self._images)]


class ManyDigits(Digits):
    """Rotated Digits, each image many times."""

    benchmark = replace(BENCHMARKS["digits"], name="many-digits", title="Digits, repeated", counts=None)

    def images(self, domain: str, apart: bool = False) -> tuple[Repeated | np.ndarray, np.ndarray]:
        """The images of a domain, up to the wanted number."""
        images, labels = super().images(domain, apart)
        if apart:
            return images, labels
        wanted = int(os.environ.get("MANY_DIGITS", "1000"))
        return Repeated(images, wanted), many_labels(int(domain.removeprefix("rot")), self.data.seed_of_splits, wanted)


@lru_cache(maxsize=8)
def many_labels(angle: int, seed: int, wanted: int) -> np.ndarray:
    """Labels of the images."""
    return np.resize(digits_domain(angle, 8, seed)[1], wanted)
