"""A data set of random pictures of CIFAR-10's size, for benchmarks that measure work and not accuracy.

Use `data.dataset = "synthetic_pictures:Pictures"` with this folder in the search path. Every domain has 10,000 pictures
of 3 x 32 x 32 values and ten classes.
"""

from functools import lru_cache

import numpy as np

from fedsim.data.reader import Reader, content_hash
from fedsim.data.row import Benchmark

IMAGES, CLASSES = 10_000, 10


class Pictures(Reader):
    """Random pictures, the same in every process."""

    benchmark = Benchmark(
        "synthetic-pictures", "Random pictures", tuple("abcdef"), tuple(map(str, range(CLASSES))), 3, source="invented"
    )

    def images(self, domain: str, apart: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """The pictures of a domain, and their labels."""
        return pictures(domain)

    def fingerprint(self, domain: str) -> str:
        """A hash of the pictures."""
        return content_hash(pictures(domain)[0].tobytes())


@lru_cache(maxsize=6)
def pictures(domain: str) -> tuple[np.ndarray, np.ndarray]:
    """Pictures uint8 [N, 3, 32, 32] and labels int64 [N] of a domain."""
    values = np.random.default_rng(ord(domain)).integers(0, 256, (IMAGES, 3, 32, 32), dtype=np.uint8)
    return values, np.arange(IMAGES) % CLASSES
