"""FedADG's bank: the average of the clients' generators."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies.banks.checks import fault, misfit
from strategies.parts import SERVER, Arrays, Entries, OneForAll, ServerRound, When

BLOCK = 1 << 15  # values that are added up at a time, so that they stay in the processor's cache
DIMENSIONS = {"hidden.weight": 2, "hidden.bias": 1, "out.weight": 2, "out.bias": 1}


@dataclass(frozen=True)
class FeatureGenerator(OneForAll):
    """G <- sum_k p_k G_k with the weights p_k of the round, for every rule that fuses the model.

    Source: FedADG (Zhang et al., arXiv 2111.10487). G is two linear layers, `hidden` and `out`. Nothing is sent in the
    first round, in which all clients make the same G from the run's seed.
    """

    name: ClassVar[str] = "generator"
    when: ClassVar[When] = "round"

    def accept(self, client: str, arrays: Arrays, server: ServerRound) -> str:
        """Refuses records other than two layers that fit each other and the G of earlier rounds."""
        if reason := fault(arrays, DIMENSIONS):
            return reason
        if generator := server.banks.get(self.name, {}).get(SERVER):
            return misfit(arrays, generator)
        hidden, out = arrays["hidden.weight"].shape, arrays["out.weight"].shape
        if out[0] != (server.feature_dim or out[0]):
            return f"it makes features of width {out[0]}, the network's is {server.feature_dim}"
        if arrays["hidden.bias"].shape != hidden[:1] or arrays["out.bias"].shape != out[:1] or out[1] != hidden[0]:
            return f"its layers {list(hidden)} and {list(out)} do not fit each other or their biases"
        return ""

    def merge(self, bank: Entries, entries: Entries, server: ServerRound) -> dict[str, Arrays]:
        """The weighted mean; the sums are made in the order of the domains, in float64."""
        first = next(iter(entries.values()))
        new = {name: np.empty(first[name].shape, np.float32) for name in DIMENSIONS}
        for name, mean in new.items():
            flat = {client: arrays[name].reshape(-1) for client, arrays in entries.items()}
            for begin in range(0, mean.size, BLOCK):
                block = slice(begin, begin + BLOCK)
                total = np.zeros(len(mean.reshape(-1)[block]))
                for client, values in flat.items():
                    total += server.weights[client] * values[block].astype(np.float64)
                mean.reshape(-1)[block] = total
        return {SERVER: new}
