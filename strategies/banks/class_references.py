"""FedSR's bank: one Gaussian per class, averaged over the clients that have the class."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies.parts import SERVER, Arrays, Entries, OneForAll, RefusedUpdateError, ServerRound, Update, When

ROWS = ("r_mu", "r_rho")
FIRST = {"r_mu": 0.0, "r_rho": 1.0}


@dataclass(frozen=True)
class ClassReferences(OneForAll):
    """r_y <- sum_k n_ky r_ky / sum_k n_ky over the clients that replied and have class y; without any r_y stays.

    Source: FedSR (Nguyen et al., NeurIPS 2022). A contribution has `counts` int64 [C] and the rows `r_mu`, `r_rho`
    float32 [P, d] of the P classes with a positive count, in their order. Clients receive all 2 C d numbers. In the
    first round they receive nothing, and every client starts from mean 0 and rho 1; a class that no client has had yet
    has the same values.

    shared: false turns the bank off, for a reference that every client keeps to itself
    """

    shared: bool = True
    name: ClassVar[str] = "class_reference"
    when: ClassVar[When] = "round"

    def accept(self, client: str, arrays: Arrays, server: ServerRound) -> str:
        """Refuses records other than one row for each counted class."""
        if arrays.keys() != {*ROWS, "counts"}:
            return f"it holds {sorted(arrays)}, expected {sorted({*ROWS, 'counts'})}"
        counts = arrays["counts"]
        if counts.dtype != np.int64 or counts.ndim != 1 or len(counts) != (server.classes or len(counts)):
            return f"counts are {counts.dtype}{list(counts.shape)}, expected int64[{server.classes}]"
        if (counts < 0).any():
            return "a count is negative"
        for name in ROWS:
            references, rows = arrays[name], int((counts > 0).sum())
            if references.dtype != np.float32 or references.ndim != 2 or len(references) != rows:
                return f"{name} is {references.dtype}{list(references.shape)}, expected float32 with {rows} rows"
        return ""

    def gather(self, update: Update, server: ServerRound) -> Arrays:
        """The client's rows."""
        rows = update.records[self.name]
        counted = sum(rows["counts"].tolist())  # NumPy's sum of numbers near 2^63 would wrap around
        if counted > update.examples:
            raise RefusedUpdateError(update.client, f"{self.name}: it counts {counted} of {update.examples} images")
        return rows

    def merge(self, bank: Entries, entries: Entries, server: ServerRound) -> dict[str, Arrays]:
        """The new reference; the sums are made in the order of the domains, in float64."""
        counts = np.stack([entry["counts"] for entry in entries.values()])
        total = counts.sum(axis=0)
        new = {}
        for name in ROWS:
            width = next(iter(entries.values()))[name].shape[1]
            old = bank.get(SERVER, {}).get(name, np.full((len(total), width), FIRST[name], np.float32))
            summed = np.zeros((len(total), width))
            for weights, entry in zip(counts, entries.values(), strict=True):
                summed[weights > 0] += weights[weights > 0, None] * entry[name].astype(np.float64)
            mean = summed / np.maximum(total, 1)[:, None]
            new[name] = np.where(total[:, None] > 0, mean, old).astype(np.float32)
        return {SERVER: new}
