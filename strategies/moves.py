"""The changes of the parameters by a round's clients: their moves, and the means of moves."""

from collections.abc import Mapping, Sequence

import numpy as np

from strategies.server_round import ServerRound, Update


def moves(updates: Sequence[Update], server: ServerRound) -> list[dict[str, np.ndarray]]:
    """delta_k = theta_k - theta of the shared parameters, in float64: what rules compare by distance or direction.

    Distances between models equal those between their updates, and rounding errors are smaller with updates when models
    are large and alike. Counters and running statistics are left out, because they would dominate the parameters.
    """
    names = sorted(server.parameters & updates[0].arrays.keys())
    start = {name: np.asarray(server.previous[name], np.float64) for name in names}
    return [{name: update.arrays[name] - start[name] for name in names} for update in updates]


def mean_move(deltas: Sequence[Mapping[str, np.ndarray]], coefficients: Sequence[float], name: str) -> np.ndarray:
    """sum_k a_k delta_k of one tensor, in float64 and in the order of the clients; the a_k need not sum to 1."""
    total = coefficients[0] * deltas[0][name]
    for coefficient, delta in zip(coefficients[1:], deltas[1:], strict=True):
        total += coefficient * delta[name]
    return total


def moved(name: str, move: np.ndarray, server: ServerRound) -> np.ndarray:
    """theta + move of one tensor, in the tensor's own type."""
    start = server.previous[name]
    return np.asarray(start + move, dtype=start.dtype)
