"""Banks that clients fill once: styles (channel statistics) and low-frequency amplitudes of their images.

A bank is kept as {client: arrays}. The client part with the same `bank` name computes the contributions and says in
`discloses` what they tell about the images; the server checks, keeps and hands them out, and does not look further.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedsim.arrays import all_finite
from strategies.parts import Arrays, Bank


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


@dataclass(frozen=True)
class StyleBank(Bank):
    """B = {k: (mu_k, sigma_k)}: channel means and standard deviations, float32 [J_k, C_s], J_k = 1 for overall styles.

    CCST (WACV 2023), banks 1.2. The whole bank goes to every client, 2 * C_s floats per style; a client takes itself
    out where needed. A client that failed in phase 0 is missing for good (the bank is frozen), and still gets the
    others' styles. Without foreign styles the clients train on their own images, as in FedAvg.
    """

    name: ClassVar[str] = "style"

    def accept(self, client: str, arrays: Arrays) -> str:
        """Refuses wrong names, shapes, NaN and standard deviations that are not positive."""
        reason = fault(arrays, {"mean": 2, "std": 2})
        if not reason and arrays["mean"].shape != arrays["std"].shape:
            reason = f"mean is {list(arrays['mean'].shape)} but std {list(arrays['std'].shape)}"
        if not reason and not (arrays["std"] > 0).all():
            reason = "a standard deviation is not positive"
        return reason

    def hand_out(self, bank: Mapping[str, Arrays], client: str) -> dict[str, np.ndarray]:
        """All styles, as `client:mean` and `client:std`."""
        return {f"{owner}:{name}": array for owner, arrays in bank.items() for name, array in arrays.items()}


@dataclass(frozen=True)
class AmplitudeBank(Bank):
    """A = {k: amplitude spectra of some of its images}, float32 [J_k, C, rows, columns].

    ELCFS / FedDG (CVPR 2021), banks 2.2. Each client gets all other clients' spectra. A client that failed in phase 0
    is missing for good, and still gets the others'.
    """

    name: ClassVar[str] = "amplitude"

    def accept(self, client: str, arrays: Arrays) -> str:
        """Refuses wrong names, shapes, NaN and negative amplitudes."""
        reason = fault(arrays, {"amplitude": 4})
        return reason or ("an amplitude is negative" if (arrays["amplitude"] < 0).any() else "")

    def hand_out(self, bank: Mapping[str, Arrays], client: str) -> dict[str, np.ndarray]:
        """The other clients' spectra, by client."""
        return {owner: arrays["amplitude"] for owner, arrays in bank.items() if owner != client}
