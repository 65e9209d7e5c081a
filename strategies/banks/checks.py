"""Checks of the records that clients contribute to a bank."""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from fedsim.arrays import all_finite
from strategies.parts import Arrays


def owned(arrays: Arrays) -> dict[str, np.ndarray]:
    """Copies of a record's arrays, which would otherwise be views of a message."""
    return {name: np.array(array) for name, array in arrays.items()}


def odd_shapes(entries: Mapping[str, Arrays], earlier: str = "") -> dict[str, str]:
    """Clients with arrays whose shapes (the first axis aside) or types differ from those of most others, with the
    reason.

    All clients have the same settings, so a client that differs is broken. On a tie the first client in the order of
    the domains counts as right. `earlier`, the `layout_of` contributions that were accepted before, counts as right
    against any majority.
    """
    layouts = {client: layout_of(arrays) for client, arrays in entries.items()}
    counted = Counter(layouts.values())
    usual = earlier or max(layouts.values(), key=lambda layout: counted[layout], default="")
    return {
        client: f"its arrays are {layout}, the other clients' {usual}"
        for client, layout in layouts.items()
        if layout != usual
    }


def layout_of(arrays: Arrays) -> str:
    """Names, shapes (the first axis aside) and types of a contribution, as text."""
    return repr({name: (array.shape[1:], str(array.dtype)) for name, array in sorted(arrays.items())})


def misfit(arrays: Arrays, like: Arrays) -> str:
    """The reason why arrays do not have exactly the names, shapes and types of the tensors `like`, or empty."""
    if arrays.keys() != like.keys():
        odd = sorted(arrays.keys() ^ like.keys())
        return f"it holds {len(arrays)} tensors, expected {len(like)}; {odd[0]!r} is in only one of the two"
    for name, array in arrays.items():
        if array.shape != like[name].shape or array.dtype != like[name].dtype:
            wanted = f"{like[name].dtype}{list(like[name].shape)}"
            return f"{name!r} is {array.dtype}{list(array.shape)}, expected {wanted}"
    return ""


def fault(arrays: Arrays, dimensions: Mapping[str, int]) -> str:
    """The reason why arrays are not exactly the float32 arrays of these names and numbers of dimensions, or empty."""
    if arrays.keys() != dimensions.keys():
        return f"it holds {sorted(arrays)}, expected {sorted(dimensions)}"
    for name, count in dimensions.items():
        array = arrays[name]
        if array.dtype != np.float32 or array.ndim != count or not array.size:
            return f"{name} is {array.dtype}{list(array.shape)}, expected filled float32 with {count} dimensions"
        if not all_finite(array):
            return f"{name} has NaN or infinite values"
    return ""
