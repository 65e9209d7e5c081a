"""Checks of the records that clients contribute to a bank."""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from fedsim.parts.part import Part
from fedsim.tensors.arrays import all_finite
from strategies.parts import ArrayDict, Arrays, ServerRound
from strategies.stored import heads_of


def owned(arrays: Arrays) -> ArrayDict:
    """Copies of a record's arrays, which would otherwise be views of a message."""
    return {name: np.array(array) for name, array in arrays.items()}


def odd_shapes(layouts: Mapping[str, str], earlier: str = "") -> dict[str, str]:
    """Clients whose arrays differ in shape (the first axis aside) or type from most others', with the reason.

    layouts: the `layout_of` each client's arrays. All clients follow the same settings, so an odd one is broken; on a
    tie the first client in domain order is right.
    `earlier`, the `layout_of` contributions that were accepted before, is right whatever most say now.
    """
    counted = Counter(layouts.values())
    usual = earlier or max(layouts.values(), key=lambda layout: counted[layout], default="")
    return {
        name: f"its arrays are {layout}, the other clients' {usual}"
        for name, layout in layouts.items()
        if layout != usual
    }


def layout_of(arrays: Arrays) -> str:
    """Names, shapes (the first axis aside) and types of a contribution, as text."""
    return repr({name: (shape[1:], str(dtype)) for name, (shape, dtype) in sorted(heads_of(arrays).items())})


def misfit(arrays: Arrays, like: Arrays) -> str:
    """Reason why arrays do not have exactly the names, shapes and types of the tensors `like`, or empty."""
    heads, expected = heads_of(arrays), heads_of(like)
    if heads.keys() != expected.keys():
        odd = sorted(heads.keys() ^ expected.keys())
        return f"it holds {len(heads)} tensors, expected {len(expected)}; {odd[0]!r} is in only one of the two"
    for name, (shape, dtype) in heads.items():
        if (shape, dtype) != expected[name]:
            return f"{name!r} is {dtype}{list(shape)}, expected {expected[name][1]}{list(expected[name][0])}"
    return ""


def same_layout(part: Part, arrays: Arrays, like: Arrays) -> ArrayDict:
    """The tensors that a part returned. ValueError names a part with a bug: they are not the model's."""
    if reason := misfit(arrays, like):
        raise ValueError(f"{type(part).__name__} returned tensors that are not the model's: {reason}")
    return dict(arrays)


def beyond_images(rows: int, client: str, server: ServerRound) -> str:
    """The reason why a contribution has more rows than its client has images, or empty."""
    images = sum(server.class_counts.get(client, ()))
    return f"it holds {rows} rows, for {images} images" if images and rows > images else ""


def fault(arrays: Arrays, dimensions: Mapping[str, int], filled: bool = True) -> str:
    """The reason why arrays are not exactly the float32 arrays of these names and numbers of dimensions, or empty.

    filled: an array without any value is refused too
    """
    if arrays.keys() != dimensions.keys():
        return f"it holds {sorted(arrays)}, expected {sorted(dimensions)}"
    for name, count in dimensions.items():
        array = arrays[name]
        if array.dtype != np.float32 or array.ndim != count or (filled and not array.size):
            form = "filled float32" if filled else "float32"
            return f"{name} is {array.dtype}{list(array.shape)}, expected {form} with {count} dimensions"
        if not all_finite(array):
            return f"{name} has NaN or infinite values"
    return ""
