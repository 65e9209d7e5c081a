"""FedIIR's bank: a running mean of the clients' classifier gradients."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from strategies.banks.checks import misfit
from strategies.parts import SERVER, Arrays, Entries, OneForAll, ServerRound, When

COUNT = "batches"  # the entry with the number of batches in a client's sum


@dataclass(frozen=True)
class ClassifierGradients(OneForAll):
    """g <- ema g + (1 - ema) sum_k s_k / sum_k b_k; s_k is the sum of client k's b_k batch gradients of the classifier.

    Source: FedIIR (Guo et al., ICML 2023), phase 1. g starts at 0 and has no bias correction. The gradients are of the
    model that the round starts from. They therefore cost an exchange before the training of every round, in which the
    model is sent once more and a classifier comes back.

    ema: the weight of the old mean; 0 takes the gradients of this round alone
    """

    ema: Annotated[float, Field(ge=0, lt=1)] = 0.95
    name: ClassVar[str] = "classifier_gradient"
    when: ClassVar[When] = "before"

    def accept(self, client: str, arrays: Arrays, server: ServerRound) -> str:
        """Refuses records other than a gradient of the classifier with a count of batches above 0."""
        head = {name: array for name, array in server.previous.items() if name.startswith("head.")}
        reason = misfit(arrays, {**head, COUNT: np.zeros(1, np.float32)})
        return reason or ("" if arrays[COUNT].item() >= 1 else f"{COUNT} is {arrays[COUNT].item():g}")

    def compared(self, arrays: Arrays) -> Arrays:
        """The mean gradient of a batch."""
        count = float(arrays[COUNT].item())
        return {name: array / count for name, array in arrays.items() if name != COUNT}

    def merge(self, bank: Entries, entries: Entries, server: ServerRound) -> dict[str, Arrays]:
        """The new g; the sums are made in the order of the domains, in float64."""
        old, count = bank.get(SERVER, {}), math.fsum(float(entry[COUNT].item()) for entry in entries.values())
        new = {}
        for name, like in next(iter(entries.values())).items():
            if name != COUNT:
                mean = sum(np.asarray(entry[name], np.float64) for entry in entries.values()) / count
                new[name] = np.asarray(self.ema * old.get(name, 0.0) + (1 - self.ema) * mean, dtype=like.dtype)
        return {SERVER: new}
