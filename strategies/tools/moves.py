"""The changes of the parameters by a round's clients: their moves, and the means of moves."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from strategies.aggregate import Shares
from strategies.server_round import Arrays, ServerRound, Update


class Move(Mapping[str, np.ndarray]):
    """delta = theta_k - theta of one client, in float64. Tensors are subtracted when they are read, and not kept."""

    def __init__(self, names: Sequence[str], arrays: Arrays, start: Arrays) -> None:
        self._names, self._arrays, self._start = dict.fromkeys(names), arrays, start

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        return np.subtract(self._arrays[name], self._start[name], dtype=np.float64)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def moves(updates: Sequence[Update], server: ServerRound) -> list[Move]:
    """delta_k = theta_k - theta of the shared parameters, in float64: what rules compare by distance or direction.

    Distances between models equal those between their updates, and rounding errors are smaller with updates when models
    are large and alike. Counters and running statistics are left out, because they would dominate the parameters. A
    rule that reads the moves tensor by tensor holds one tensor of each client in memory, and not their models.
    """
    names = sorted(server.parameters & updates[0].arrays.keys())
    return [Move(names, update.arrays, server.previous) for update in updates]


def gram(deltas: Sequence[Arrays]) -> np.ndarray:
    """The inner products [K, K] of the moves, over all tensors together, in float64."""
    total = np.zeros((len(deltas), len(deltas)))
    for name in deltas[0]:
        rows = np.empty((len(deltas), deltas[0][name].size))
        for row, delta in zip(rows, deltas):
            row[:] = delta[name].ravel()
        total += rows @ rows.T
    return total


def mean_move(deltas: Sequence[Arrays], coefficients: Shares, name: str) -> np.ndarray:
    """sum_k a_k delta_k of one tensor, in float64 and in the order of the clients; the a_k need not sum to 1."""
    total = coefficients[0] * deltas[0][name]
    for coefficient, delta in zip(coefficients[1:], deltas[1:], strict=True):
        total += coefficient * delta[name]
    return total


def moved(name: str, move: np.ndarray, server: ServerRound) -> np.ndarray:
    """theta + move of one tensor, in the tensor's own type."""
    start = server.previous[name]
    return np.asarray(start + move, dtype=start.dtype)
