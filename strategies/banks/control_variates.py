"""SCAFFOLD's server: the mean of all clients' control variates."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies.banks.checks import misfit
from strategies.parts import SERVER, Arrays, Bank, Entries, ServerRound


@dataclass(frozen=True)
class ControlVariates(Bank):
    """c <- c + (1/N) sum_{k in S} delta c_k, over the shared parameters; N are all clients, S those that delivered.

    SCAFFOLD (Karimireddy et al., ICML 2020), baselines.md A.8: c + (|S|/N) times the mean over S. c starts at 0, which
    goes out as an empty record. Costs the parameters once more in both directions.
    """

    name: ClassVar[str] = "control"
    when: ClassVar[str] = "round"

    def accept(self, client: str, arrays: Arrays, server: ServerRound) -> str:
        """Refuses what has not the names, shapes and types of the shared parameters."""
        return misfit(arrays, {name: server.previous[name] for name in server.parameters})

    def merge(self, bank: Entries, entries: Entries, server: ServerRound) -> dict[str, Arrays]:
        """The new c; sums in domain order, in float64."""
        old: Mapping[str, np.ndarray] = bank.get(SERVER, {})
        new = {}
        for name in sorted(server.parameters):
            change = sum(np.asarray(entries[client][name], np.float64) for client in entries) / len(server.clients)
            like = server.previous[name]
            new[name] = np.asarray(old.get(name, np.zeros_like(like)) + change, dtype=like.dtype)
        return {SERVER: new}

    def hand_out(self, bank: Entries, client: str, server: ServerRound) -> Arrays:
        """c, the same for all clients."""
        return bank.get(SERVER, {})

    def traffic(self, server: ServerRound) -> tuple[int, int]:
        """The shared parameters in both directions (nothing down in the first round)."""
        size = sum(server.previous[name].nbytes for name in server.parameters)
        return size, size
