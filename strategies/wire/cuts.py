"""Parts of tensors: one side selects and sends only them, and the other side puts them back."""

from collections.abc import Mapping

import numpy as np

from strategies.server_round import ArrayDict, Arrays, Cut


def crop(arrays: Arrays, cut: Mapping[str, Cut]) -> ArrayDict:
    """The tensors; of those that `cut` names only the kept entries (new arrays)."""
    cropped = dict(arrays)
    for name, array in arrays.items():
        if name in cut:
            indices = _index(array, cut[name])
            cropped[name] = array[indices]
    return cropped


def uncrop(arrays: Arrays, cut: Mapping[str, Cut], base: Arrays) -> ArrayDict:
    """The complete tensors. Entries that were not kept are those of `base`."""
    complete = dict(arrays)
    for name, axes in cut.items():
        array = np.array(base[name])
        indices = _index(array, axes)
        array[indices] = arrays[name]
        complete[name] = array
    return complete


def _index(array: np.ndarray, cut: Cut) -> tuple[np.ndarray, ...]:
    """The kept entries as indices of numpy; an axis that is not cut (None) keeps all its entries."""
    indices = []
    for size, axis in zip(array.shape, cut, strict=True):
        entries = np.arange(size) if axis is None else axis
        indices.append(entries)
    return np.ix_(*indices)
