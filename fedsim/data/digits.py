"""Rotated Digits: scikit-learn's real handwritten digits, embedded in the package it comes with (no download)."""

import importlib.util
import math
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

PER_CLASS = 100


def rotate(images: np.ndarray, clockwise: float) -> np.ndarray:
    """Images uint8 [N,1,s,s] rotated about their centre by `clockwise` degrees, bilinear, zero fill, same size.

    What torchvision's `rotate` gives, without its import, which costs every client process of a deployed round two
    seconds. At the border the zero fill counts twice, there and here: in the sampling and by the sampled mask.
    """
    if clockwise == 0:
        return images
    side, angle = images.shape[-1], math.radians(clockwise)
    turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]) / (side / 2)
    steps = torch.arange(side) - (side - 1) / 2
    grid = torch.cartesian_prod(steps, steps).flip(1) @ turn  # (x, y) in the image for every pixel of the result
    grid = grid.view(1, side, side, 2).expand(len(images), -1, -1, -1)
    source = torch.from_numpy(images).float()
    masked = torch.cat([source, torch.ones_like(source)], dim=1)
    turned, mask = F.grid_sample(masked, grid, align_corners=False).chunk(2, dim=1)
    return (turned * mask).round_().to(torch.uint8).numpy()


def resize(images: np.ndarray, image_size: int) -> np.ndarray:
    """Images uint8 [N,1,H,W] -> [N,1,s,s], bilinear (antialiased when shrinking)."""
    if images.shape[-2:] == (image_size, image_size):
        return images
    size = (image_size, image_size)
    scaled = F.interpolate(torch.from_numpy(images).float(), size, mode="bilinear", antialias=True)
    return scaled.round_().clamp_(0, 255).to(torch.uint8).numpy()


@lru_cache(maxsize=1)
def _first_hundred() -> tuple[np.ndarray, np.ndarray]:
    """The first 100 images of every class in file order: uint8 [1000,1,8,8] and labels int64 [1000]."""
    # The package's file, read without importing the package, which would cost every process a second.
    package = Path(importlib.util.find_spec("sklearn").origin).parent
    table = np.loadtxt(package / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    images, labels = table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1].astype(np.int64)
    chosen = np.sort(np.concatenate([np.flatnonzero(labels == label)[:PER_CLASS] for label in range(10)]))
    grey = np.round(images[chosen] * (255 / 16)).astype(np.uint8)  # the file's grey values are 0..16
    return grey, labels[chosen]


@lru_cache(maxsize=12)
def digits_domain(angle: int, image_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Domain rot<angle>: images uint8 [1000,1,s,s], rotated clockwise, and labels int64 [1000].

    Every domain shows the SAME 1,000 images, like CSAC's Rotated MNIST: a target image has been seen by the clients,
    but at other angles.
    """
    images, labels = _first_hundred()
    return rotate(resize(images, image_size), angle), labels
