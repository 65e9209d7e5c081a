"""Rotated and coloured digits: scikit-learn's real handwritten digits, embedded in its package (no download).

The colour of coloured digits tells the label better than the shape does, and tells it falsely on the unseen domain.
"""

import importlib.util
import math
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from fedsim.common.errors import UserError
from fedsim.data.reader import Images, Reader, content_hash
from fedsim.data.splits import seed_hash, shuffled

PER_CLASS = 100
FLIPPED = 0.25  # share of the labels of coloured digits that are false: no shape tells more than 75 % of them
AGREE = (10, 80, 90)  # percent of a coloured domain's images whose colour agrees with the label


def rotate(images: np.ndarray, clockwise: float) -> np.ndarray:
    """Images uint8 [N,1,s,s] rotated about their centre by `clockwise` degrees, bilinear, zero fill, same size.

    What torchvision's `rotate` gives, without its import, which costs every client process of a deployed round two
    seconds. At the border the zero fill counts twice, there and here: in the sampling and by the sampled mask.
    """
    if clockwise == 0:
        return images
    side = images.shape[-1]
    angle = math.radians(clockwise)
    cosine, sine = math.cos(angle), math.sin(angle)
    rotation = torch.tensor([[cosine, -sine], [sine, cosine]])
    turn = rotation / (side / 2)
    steps = torch.arange(side) - (side - 1) / 2
    pixels = torch.cartesian_prod(steps, steps).flip(1)  # (x, y) of every pixel of the result
    places = pixels @ turn  # where it is read in the image
    grid = places.view(1, side, side, 2).expand(len(images), -1, -1, -1)
    source = torch.from_numpy(images).float()
    masked = torch.cat([source, torch.ones_like(source)], dim=1)
    sampled = F.grid_sample(masked, grid, align_corners=False)
    turned, mask = sampled.chunk(2, dim=1)
    return (turned * mask).round_().to(torch.uint8).numpy()


def resize(images: np.ndarray, image_size: int) -> np.ndarray:
    """Images uint8 [N,1,H,W] -> [N,1,s,s], bilinear (antialiased when shrinking)."""
    size = (image_size, image_size)
    if images.shape[-2:] == size:
        return images
    pixels = torch.from_numpy(images).float()
    scaled = F.interpolate(pixels, size, mode="bilinear", antialias=True)
    return scaled.round_().clamp_(0, 255).to(torch.uint8).numpy()


def digits_file() -> Path:
    """The package's file, found without importing the package, which would cost every process a second."""
    spec = importlib.util.find_spec("sklearn")
    origin = (spec and spec.origin) or ""
    return Path(origin).parent / "datasets/data/digits.csv.gz"


@lru_cache(maxsize=1)
def _all_digits() -> Images:
    """All images in file order: uint8 [1797,1,8,8] and labels int64 [1797]."""
    table = np.loadtxt(digits_file(), delimiter=",")
    values = table[:, :-1].reshape(-1, 1, 8, 8)  # from 0 to 16
    grey = np.round(values * (255 / 16)).astype(np.uint8)
    labels = table[:, -1].astype(np.int64)
    return grey, labels


@lru_cache(maxsize=12)
def digits_domain(
    angle: int,
    image_size: int,
    split_seed: int = 0,
    apart: bool = False,
) -> Images:
    """Domain rot<angle> as clients see it: images uint8 [1000,1,s,s], rotated clockwise, and labels int64 [1000].

    100 images a class, drawn by `split_seed`: the SAME in every domain, like CSAC's Rotated MNIST. `apart` gives the
    797 images that no client has in any domain: the unseen domain is tested on them.
    """
    images, labels = _all_digits()
    chosen = some_of_each(labels, PER_CLASS, seed_hash(split_seed, "digits"))
    if apart:
        chosen = np.setdiff1d(np.arange(len(labels)), chosen)
    scaled = resize(images[chosen], image_size)
    return rotate(scaled, angle), labels[chosen]


def some_of_each(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Sorted indices of `count` images of every digit, drawn by a seed; UserError when a digit has fewer."""
    order = shuffled(len(labels), seed)
    chosen = []
    for digit in range(10):
        members = order[labels[order] == digit]
        if len(members) < count:
            raise UserError(f"digit {digit} has {len(members)} of the {count} images needed; use the complete file")
        chosen.append(members[:count])
    return np.sort(np.concatenate(chosen))


class Digits(Reader):
    """Reads Rotated Digits."""

    reads_root = False

    def images(self, domain: str, apart: bool = False) -> Images:
        """Images and labels of domain rot<angle>."""
        angle = int(domain.removeprefix("rot"))
        return digits_domain(angle, self.data.image_size, self.data.seed_of_splits, apart)

    def fingerprint(self, domain: str) -> str:
        """Hash of the embedded file."""
        return content_hash(digits_file().read_bytes())


def colored(
    grey: np.ndarray,
    digits: np.ndarray,
    agree: int,
    split_seed: int,
) -> Images:
    """Images uint8 [N,3,s,s] and labels int64 [N] of a domain whose colour agrees with `agree` % of the labels.

        y = [digit >= 5], flipped with probability .25;  colour = y, flipped with probability 1 - agree/100

    Colour 0 is red and colour 1 green. The domains share no image: they are shuffled by the seed of splits and dealt in
    turn. grey: uint8 [M,1,s,s] with its digits [M].
    """
    order = shuffled(len(digits), seed_hash(split_seed, "colored"))
    chosen = order[AGREE.index(agree) :: len(AGREE)]
    count = len(chosen)
    rng = np.random.RandomState(seed_hash(split_seed, "colored", agree))
    draws_of_labels, draws_of_colours = rng.random_sample((2, count))
    is_large = digits[chosen] >= 5
    is_false = draws_of_labels < FLIPPED
    disagrees = draws_of_colours < 1 - agree / 100
    labels = is_large ^ is_false
    colours = labels ^ disagrees
    height, width = grey.shape[2:]
    images = np.zeros((count, 3, height, width), np.uint8)
    channels = colours.astype(np.int64)
    images[np.arange(count), channels] = grey[chosen, 0]
    return images, labels.astype(np.int64)


@lru_cache(maxsize=2)
def _resized_digits(image_size: int) -> Images:
    grey, digits = _all_digits()
    return resize(grey, image_size), digits


class ColoredDigits(Digits):
    """Reads coloured digits, drawn of the embedded file."""

    def images(self, domain: str, apart: bool = False) -> Images:
        """Images and labels of domain agree<percent>."""
        grey, digits = _resized_digits(self.data.image_size)
        agree = int(domain.removeprefix("agree"))
        return colored(grey, digits, agree, self.data.seed_of_splits)
