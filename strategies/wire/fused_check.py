"""Checks of the fused model: before it is sent, and after the sites have validated it.

Before it is sent, every value must be finite, and so must the outputs of the model for a fixed batch of noise. Numbers
near the largest float32 overflow in the first layer. After the sites have validated it, the loss of more than half of
them must be finite. Where one update is much larger than the others, it must not be ten times what it was either.
Otherwise the model of the round before is kept, and the message names the client with the largest update relative to
the others.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from fedsim.models.layout import evaluating
from fedsim.tensors.arrays import all_finite, load_arrays
from strategies.parts import Arrays
from strategies.wire.limits import FIRST_LOSS, RUINED, USUAL_LOSS, upper_median_of_others

PROBE_IMAGES = 4
Probe = Callable[[Arrays], bool]


def model_probe(net: nn.Module, *shape: int) -> Probe:
    """A function that says whether a model gives finite outputs for noise; it does not change `net`.

    shape: that of one example, such as channels, height and width
    """

    def finite(arrays: Arrays) -> bool:
        state = net.state_dict()
        loaded = {name: array for name, array in arrays.items() if name in state}
        before = {name: state[name].detach().clone() for name in loaded}
        device = next(net.parameters()).device
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(PROBE_IMAGES, *shape, generator=generator)
        try:
            load_arrays(state, loaded, set(loaded))
            with evaluating(net), torch.inference_mode():
                outputs = net(noise.to(device))
                return bool(torch.isfinite(outputs).all())
        finally:
            with torch.no_grad():
                for name, value in before.items():
                    state[name].copy_(value)

    return finite


def not_finite(arrays: Arrays) -> str:
    """Name of the first tensor with NaN or infinite values, or an empty string."""
    for name, array in arrays.items():
        if not all_finite(array):
            return name
    return ""


def largest(arrays: Arrays) -> float:
    """The largest absolute value of all floating-point tensors."""
    value = 0.0
    for array in arrays.values():
        if array.dtype.kind == "f" and array.size:
            highest = float(array.max())
            lowest = float(array.min())
            value = max(value, highest, -lowest)
    return value


def is_ruined(loss: float, lowest: float | None) -> bool:
    """Whether the loss of a validation is RUINED times as large as the lowest loss of this site, and as 1."""
    usual = FIRST_LOSS if lowest is None else max(lowest, USUAL_LOSS)
    return loss > RUINED * usual


def client_of_largest_update(sizes: Mapping[str, float]) -> tuple[str, float]:
    """The client with the largest update and how many times the others' upper median it is.

    With the lower median, a client of three that hardly moves would make the larger of the two others stand out.
    """
    if not sizes:
        return "", 0.0
    client = max(sizes, key=lambda name: sizes[name])
    size = sizes[client]
    median = upper_median_of_others(sorted(sizes.values()), size)
    if not median:
        return client, math.inf
    return client, size / median
