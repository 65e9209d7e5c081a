"""SCAFFOLD's bank: the mean of all clients' control variates."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies.banks.checks import misfit
from strategies.parts import SERVER, Arrays, Entries, OneForAll, ServerRound, When


@dataclass(frozen=True)
class ControlVariates(OneForAll):
    """c <- c + (1/N) sum_{k in S} delta c_k over the shared parameters, for N clients, S of which replied.

    Source: SCAFFOLD (Karimireddy et al., ICML 2020), where c changes by |S|/N times the mean over S. c starts at 0,
    which is sent as an empty record. The bank sends the size of the parameters once more in both directions.
    """

    name: ClassVar[str] = "control"
    when: ClassVar[When] = "round"

    def accept(self, client: str, arrays: Arrays, server: ServerRound) -> str:
        """Refuses records without the names, shapes and types of the shared parameters."""
        return misfit(arrays, {name: server.previous[name] for name in server.parameters})

    def merge(self, bank: Entries, entries: Entries, server: ServerRound) -> dict[str, Arrays]:
        """The new c; the sums are made in the order of the domains, in float64."""
        old: Mapping[str, np.ndarray] = bank.get(SERVER, {})
        new = {}
        for name in sorted(server.parameters):
            change = sum(np.asarray(entries[client][name], np.float64) for client in entries) / len(server.clients)
            like = server.previous[name]
            new[name] = np.asarray(old.get(name, np.zeros_like(like)) + change, dtype=like.dtype)
        return {SERVER: new}

    def traffic(self, server: ServerRound) -> tuple[int, int]:
        """The shared parameters in both directions (none to the clients in the first round)."""
        size = sum(server.previous[name].nbytes for name in server.parameters)
        return size, size
