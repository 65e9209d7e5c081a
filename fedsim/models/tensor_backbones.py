"""Backbones for tensors that are no images: `linear`, `mlp` and `cnn-1d`. Their options stand in `model.options`."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from fedsim.common.errors import UserError
from fedsim.models.layout import Backbone, Layout

Shape = tuple[int, ...]


class LinearOptions(BaseModel):
    """`linear` has no options."""

    model_config = ConfigDict(extra="forbid", strict=True)


class MlpOptions(LinearOptions):
    """The options of `mlp`.

    widths: numbers of units of the hidden layers
    norm: `batch` puts BatchNorm1d after each linear layer
    dropout: the probability with which a hidden unit is dropped in training
    """

    widths: list[int] = Field([64, 64], min_length=1)
    norm: Literal["none", "batch"] = "none"
    dropout: float = Field(0.0, ge=0, lt=1)


class CnnOptions(LinearOptions):
    """The options of `cnn-1d`: channels of its convolutions, their kernel (odd), and norm and dropout as in `mlp`."""

    widths: list[int] = Field([32, 64], min_length=1)
    kernel: int = Field(5, ge=1)
    norm: Literal["none", "batch"] = "batch"
    dropout: float = Field(0.0, ge=0, lt=1)


class Flat(nn.Flatten):
    """Features [B, D] of tensors [B, ...]: their D numbers, so that the head is a linear model of them."""

    def __init__(self, shape: Shape, options: LinearOptions) -> None:
        super().__init__()
        self.feature_dim = math.prod(shape)


class Mlp(nn.Sequential):
    """Features [B, last width] of tensors [B, ...], which are flattened: Linear - norm - ReLU - dropout, repeated."""

    def __init__(self, shape: Shape, options: MlpOptions) -> None:
        super().__init__(nn.Flatten(), *_blocks([math.prod(shape), *options.widths], nn.Linear, nn.ReLU, options))
        self.feature_dim = options.widths[-1]


class Cnn1d(nn.Module):
    """Features [B, last width] of signals [B, channels, length]: convolutions, then the mean over time.

    Each block is a convolution of the same length, norm, ReLU, dropout and a max-pooling that halves the length while
    there are two positions.
    """

    def __init__(self, shape: Shape, options: CnnOptions) -> None:
        super().__init__()
        if len(shape) != 2:
            raise UserError(f"model.backbone: cnn-1d needs signals [channels, length], and an example has the shape "
                            f"{list(shape)}; use mlp or linear")  # fmt: skip
        if options.kernel % 2 == 0:
            raise UserError(f"model.options.kernel: {options.kernel} is even; use an odd number")
        self.feature_dim = options.widths[-1]

        def convolution(inputs: int, outputs: int) -> nn.Module:
            return nn.Conv1d(inputs, outputs, options.kernel, padding=options.kernel // 2)

        channels = [shape[0], *options.widths]
        self.layers = nn.Sequential(*_blocks(channels, convolution, _halving, options))

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, length] -> [B, last width]."""
        return self.layers(x).mean(dim=2)


class Halve(nn.MaxPool1d):
    """Max-pooling that halves the length; a single position stays."""

    def __init__(self) -> None:
        super().__init__(2, ceil_mode=True)


def _halving() -> nn.Module:
    return nn.Sequential(nn.ReLU(), Halve())


def _blocks(
    widths: Sequence[int],
    layer: Callable[[int, int], nn.Module],
    activation: Callable[[], nn.Module],
    options: MlpOptions | CnnOptions,
) -> Iterator[nn.Module]:
    """The modules of all hidden layers, from width to width."""
    for inputs, outputs in itertools.pairwise(widths):
        yield layer(inputs, outputs)
        if options.norm == "batch":
            yield nn.BatchNorm1d(outputs)
        yield activation()
        if options.dropout:
            yield nn.Dropout(options.dropout)


# name -> (class of its options, class of the module, which has `feature_dim`)
KINDS: dict[str, tuple[type[LinearOptions], Callable[[Shape, Any], nn.Module]]] = {
    "linear": (LinearOptions, Flat),
    "mlp": (MlpOptions, Mlp),
    "cnn-1d": (CnnOptions, Cnn1d),
}


def tensor_row(name: str, options: Mapping[str, Any]) -> Backbone:
    """The row of one of these backbones with its options; UserError for an option that it does not take."""
    kind, make = KINDS[name]
    try:
        settings = kind(**options)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        known = ", ".join(kind.model_fields) or "none"
        raise UserError(f"model.options.{key} of {name}: {problem['msg']}; its options: {known}") from None

    def from_shape(shape: Shape) -> nn.Module:
        return make(shape, settings)

    def of_images(image_size: int, channels: int) -> nn.Module:
        return from_shape((channels, image_size, image_size))

    return Backbone(of_images, _layout, own_channels=True, from_shape=from_shape)


def _layout(backbone: Any, image_size: int) -> Layout:
    """The feature width that the module itself says; there are no stages and no levels."""
    return Layout(backbone.feature_dim)
