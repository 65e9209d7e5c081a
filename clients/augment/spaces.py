"""The feature spaces of style transfer as parts name them, and the styles of a client's images in them."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from clients.augment import style
from clients.augment.vgg_style import SMALLEST, load_vgg
from clients.parts import ClientPart, LocalRound
from fedsim.common.errors import UserError
from fedsim.data import benchmark
from fedsim.parts.part import part_name
from fedsim.settings.experiment import Experiment

TWO_BLOCKS = 9  # the smallest images of which 3-level Haar bands have more than one value
Encoder = Literal["pixel", "haar", "vgg"]
ContentVariance = Literal["population", "unbiased"]


class StylePart(ClientPart):
    """A part that transfers styles, with the settings of its space."""

    encoder: Encoder
    content_variance: ContentVariance
    encoder_weights: str
    decoder_weights: str

    def check(self, experiment: Experiment) -> None:
        """VGG-19 needs colour images and its weight files; an unbiased variance needs two values."""
        size = experiment.data.image_size
        if self.encoder == "haar" and self.content_variance == "unbiased" and size < TWO_BLOCKS:
            raise UserError(f"encoder 'haar' makes one value per channel of images of less than {TWO_BLOCKS} pixels, "
                            "which has no unbiased variance; use content_variance = 'population'")  # fmt: skip
        if self.encoder != "vgg":
            return
        if benchmark(experiment.data).channels != 3 or size < SMALLEST:
            raise UserError(f"encoder 'vgg' needs colour images of at least {SMALLEST} pixels; use 'pixel' or 'haar'")
        space_of(self, torch.device("cpu"))


def space_of(part: StylePart, device: torch.device) -> style.Space:
    """Phi and Psi of a part."""
    if part.encoder == "vgg":
        return load_vgg(part.encoder_weights, part.decoder_weights, device, f"method.{part_name(part)}")
    return style.Pixel() if part.encoder == "pixel" else style.Haar()


def image_statistics(
    round: LocalRound, space: style.Space, positions: np.ndarray, correction: int = 0
) -> style.Statistics:
    """Means and variances [n, C_s] of training images."""
    parts = [style.statistics(space.encode(round.data.raw(chunk)), correction) for chunk in chunks_of(positions, space)]
    means, variances = (torch.cat(values) for values in zip(*parts))
    return means, variances


def chunks_of(positions: np.ndarray, space: style.Space) -> list[np.ndarray]:
    """Batches for a pass over the data outside training; small batches for a deep network."""
    size = 32 if space.slow else 256
    return [positions[start : start + size] for start in range(0, len(positions), size)]


def style_record(mean: Tensor, variance: Tensor) -> dict[str, np.ndarray]:
    """Styles [J, C_s] as they are sent: `mean` and `std`, float32."""
    return {"mean": mean.float().cpu().numpy(), "std": style.deviation(variance).float().cpu().numpy()}
