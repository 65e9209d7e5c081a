"""A module as a user may write it outside the repository, with one of everything that a setting can name."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from clients.parts import LocalRound, StepFunction, Term
from fedsim.data.reader import Reader, content_hash
from fedsim.data.row import Benchmark
from fedsim.methods.recipe import Recipe
from fedsim.models.backbones import Backbone
from fedsim.models.layout import Layout


@dataclass(frozen=True)
class Shrink(Term):
    """(weight/2) ||w||^2 over the trainable parameters; `weight=0` gives FedAvg."""

    weight: Annotated[float, Field(ge=0)] = 0.1

    def begin(self, round: LocalRound) -> StepFunction:
        parameters = [parameter for parameter in round.net.parameters() if parameter.requires_grad]
        return lambda batch: 0.5 * self.weight * sum(parameter.square().sum() for parameter in parameters)


shrunk = Recipe(terms=(Shrink(),), paper="a test")
number = 3


class Stripes(Reader):
    """Three domains of 40 images with stripes: down, across, and both ways; two classes, thin and thick."""

    benchmark = Benchmark("stripes", "Stripes", ("across", "both", "down"), ("thick", "thin"), 1)

    def images(self, domain: str, apart: bool = False) -> tuple[np.ndarray, np.ndarray]:
        size, labels = self.data.image_size, np.arange(40) % 2
        place = np.arange(size)
        noise = np.random.default_rng(len(domain)).integers(0, 90, (40, 1, size, size))
        line = np.where(labels[:, None] == 1, place % 2, place // 3 % 2) * 160
        across, down = line[:, None, :, None], line[:, None, None, :]
        pattern = {"across": across, "down": down, "both": (across + down) // 2}[domain]
        return (noise + pattern).astype(np.uint8), labels.astype(np.int64)

    def fingerprint(self, domain: str) -> str:
        return content_hash(self.images(domain)[0].tobytes())


class Flipper:
    """Flips about half of the images from left to right."""

    def __call__(self, images: Tensor) -> Tensor:
        flipped = torch.rand(len(images), 1, 1, 1) < 0.5
        return torch.where(flipped.to(images.device), images.flip(3), images)


def flat(image_size: int, channels: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, 16), nn.ReLU())


pixels = Backbone(flat, Layout(16), own_channels=True)
