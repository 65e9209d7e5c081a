"""Parts of tensors: one side selects and sends only them, and the other side puts them back."""

from collections.abc import Mapping

import numpy as np

from strategies.server_round import ArrayDict, Arrays, Cut


def crop(arrays: Arrays, cut: Mapping[str, Cut]) -> ArrayDict:
    """The tensors; of those that `cut` names only the kept entries (new arrays)."""
    return {name: array[_index(array, cut[name])] if name in cut else array for name, array in arrays.items()}


def uncrop(arrays: Arrays, cut: Mapping[str, Cut], base: Arrays) -> ArrayDict:
    """The complete tensors. Entries that were not kept are those of `base`."""
    complete = dict(arrays)
    for name, indices in cut.items():
        complete[name] = np.array(base[name])
        complete[name][_index(base[name], indices)] = arrays[name]
    return complete


def _index(array: np.ndarray, kept: Cut) -> tuple[np.ndarray, ...]:
    return np.ix_(*(np.arange(size) if axis is None else axis for size, axis in zip(array.shape, kept, strict=True)))
