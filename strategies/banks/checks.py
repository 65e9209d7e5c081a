"""Checks of what clients contribute to a bank."""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from fedsim.arrays import all_finite
from strategies.parts import Arrays


def owned(arrays: Arrays) -> dict[str, np.ndarray]:
    """Copies of a record's arrays, which are views of a message otherwise."""
    return {name: np.array(array) for name, array in arrays.items()}


def odd_shapes(entries: Mapping[str, Arrays]) -> dict[str, str]:
    """Clients whose arrays differ in shape (the first axis aside) or type from most others', with the reason.

    All clients follow the same settings, so an odd one is broken; on a tie the first client in domain order is right.
    """
    layouts = {
        client: {name: (array.shape[1:], str(array.dtype)) for name, array in sorted(arrays.items())}
        for client, arrays in entries.items()
    }
    counted = Counter(map(repr, layouts.values()))
    usual = max(layouts.values(), key=lambda layout: counted[repr(layout)], default={})
    return {
        client: f"its arrays are {layout}, the other clients' {usual}"
        for client, layout in layouts.items()
        if layout != usual
    }


def fault(arrays: Arrays, dimensions: Mapping[str, int]) -> str:
    """Reason why arrays are not exactly the float32 arrays of these names and numbers of dimensions, or empty."""
    if arrays.keys() != dimensions.keys():
        return f"it holds {sorted(arrays)}, expected {sorted(dimensions)}"
    for name, count in dimensions.items():
        array = arrays[name]
        if array.dtype != np.float32 or array.ndim != count or not array.size:
            return f"{name} is {array.dtype}{list(array.shape)}, expected filled float32 with {count} dimensions"
        if not all_finite(array):
            return f"{name} has NaN or infinite values"
    return ""
