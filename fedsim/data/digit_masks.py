"""Digit masks: the embedded digits as figures on four kinds of ground, with the masks of the figure and its core."""

from functools import lru_cache

import numpy as np
from numpy.random import RandomState

from fedsim.data.digits import Digits, _all_digits, resize, some_of_each
from fedsim.data.reader import Images
from fedsim.data.splits import seed_hash, shuffled

PER_CLASS = 40  # images of each digit in every client domain
TESTED = 200  # images of the unseen domain
FIGURE, CORE = 0.3, 0.7  # ink (0 to 1) from which a pixel belongs to a structure


class DigitMasks(Digits):
    """Reads digit masks, drawn of the same file."""

    def images(self, domain: str, apart: bool = False) -> Images:
        """Images uint8 [N,1,s,s] on the domain's ground, and the digits, which stratify splits."""
        pictures = _pictures(domain, self.data.image_size, self.data.seed_of_splits, apart)
        _, digits = self._ink(apart)
        return pictures, digits

    def labels(self, domain: str) -> np.ndarray:
        """The digits alone."""
        _, digits = self._ink(apart=False)
        return digits

    def masks(self, domain: str, apart: bool = False) -> np.ndarray:
        """Masks uint8 [N,2,s,s]: figure (ink of at least 0.3) and, within it, core (ink of at least 0.7)."""
        ink, _ = self._ink(apart)
        figure = ink >= FIGURE
        core = ink >= CORE
        return np.concatenate([figure, core], axis=1).astype(np.uint8)

    def _ink(self, apart: bool) -> Images:
        return _drawn(self.data.image_size, self.data.seed_of_splits, apart)


@lru_cache(maxsize=4)
def _drawn(image_size: int, split_seed: int, apart: bool) -> Images:
    """Ink in [0, 1], float32 [N,1,s,s], and digits int64 [N]: those that all client domains share, or that none has.

    The digit fills three quarters of the picture, at a random position that is the same in every domain.
    """
    images, labels = _all_digits()
    seed = seed_hash(split_seed, "digit-masks")
    chosen = some_of_each(labels, PER_CLASS, seed)
    if apart:
        order = shuffled(len(labels), seed)
        chosen = np.setdiff1d(order, chosen, assume_unique=True)[:TESTED]
    side = 3 * image_size // 4
    scaled = resize(images[chosen], side)
    small = scaled.astype(np.float32) / 255
    count = len(chosen)
    ink = np.zeros((count, 1, image_size, image_size), np.float32)
    rng = RandomState(seed_hash(split_seed, "digit-masks", "places", int(apart)))
    free = image_size - side
    corners = rng.randint(0, free + 1, (count, 2))
    for picture, digit, (top, left) in zip(ink, small, corners):
        rows = slice(top, top + side)
        columns = slice(left, left + side)
        picture[0, rows, columns] = digit[0]
    return ink, labels[chosen]


def _of_each(
    count: int,
    rng: RandomState,
    low: float,
    high: float,
) -> np.ndarray:
    """A number between these two for each of `count` images, [N,1,1,1]."""
    return rng.uniform(low, high, (count, 1, 1, 1))


def _places(rng: RandomState, count: int, size: int) -> np.ndarray:
    """The place [N,1,s,s] of each pixel along a random direction of each image."""
    rows, columns = np.mgrid[:size, :size] / size
    angle = _of_each(count, rng, 0, 2 * np.pi)
    return np.cos(angle) * rows + np.sin(angle) * columns


def _textured(ink: np.ndarray, along: np.ndarray, rng: RandomState) -> np.ndarray:
    """Bright ink on stripes of a random period."""
    waves = _of_each(len(ink), rng, 3, 6)
    phase = _of_each(len(ink), rng, 0, 2 * np.pi)
    angle = 2 * np.pi * waves * along + phase
    ground = 0.2 + 0.15 * np.sin(angle)
    return ground + (0.95 - ground) * ink


def _shaded(ink: np.ndarray, along: np.ndarray, rng: RandomState) -> np.ndarray:
    """Bright ink under light that falls off to one side."""
    light = along - along.min(axis=(2, 3), keepdims=True)
    brightest = light.max(axis=(2, 3), keepdims=True)
    light = 0.35 + 0.65 * light / brightest
    return (0.25 + 0.7 * ink) * light


def _inverted(ink: np.ndarray, along: np.ndarray, rng: RandomState) -> np.ndarray:
    """Dark ink on a bright ground."""
    ground = _of_each(len(ink), rng, 0.75, 0.95)
    return ground * (1 - 0.85 * ink)


def _noise(ink: np.ndarray, along: np.ndarray, rng: RandomState) -> np.ndarray:
    """Bright ink on a grey ground, with strong pixel noise."""
    ground = _of_each(len(ink), rng, 0.15, 0.4)
    noise = rng.normal(0, 0.15, ink.shape)
    return ground + (0.9 - ground) * ink + noise


GROUNDS = {
    "textured": _textured,
    "shaded": _shaded,
    "inverted": _inverted,
    "noise": _noise,
}


@lru_cache(maxsize=8)
def _pictures(
    domain: str,
    image_size: int,
    split_seed: int,
    apart: bool,
) -> np.ndarray:
    """Images uint8 [N,1,s,s] of a domain: ink over a ground.

    textured: bright ink on stripes of a random direction and period. shaded: bright ink under light that falls off to
    one side. inverted: dark ink on a bright ground. noise: bright ink on a grey ground, with strong pixel noise.
    """
    ink, _ = _drawn(image_size, split_seed, apart)
    rng = RandomState(seed_hash(split_seed, "digit-masks", domain, int(apart)))
    along = _places(rng, len(ink), image_size)
    on_ground = GROUNDS.get(domain, _noise)
    picture = on_ground(ink, along, rng)
    grain = rng.normal(0, 0.02, ink.shape)
    levels = 255 * (picture + grain).clip(0, 1)
    return np.round(levels).astype(np.uint8)
