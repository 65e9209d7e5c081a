"""Checks of the weights that a rule gives to the clients of a round."""

import math
from collections.abc import Sequence

from fedsim.common.errors import UserError
from fedsim.common.user_code import place_of
from fedsim.parts.part import part_name
from strategies.parts import ServerRound, Update, Weights

ROUNDING = 1e-4  # how far from 1 the sum may be, as with numbers of single precision


def weights_of(rule: Weights, updates: Sequence[Update], server: ServerRound) -> dict[str, float]:
    """The weights that a rule gives; UserError where they are not those of all clients, none below 0, with the sum 1.

    A fusion may use them in another way: FedOMG's coefficients, whose sum is not 1, are its own and no weights.
    """
    weights = rule.weigh(updates, server)
    if reason := fault(weights, [update.client for update in updates]):
        raise UserError(
            f"the weights of {part_name(rule)} {reason} in round {server.round} ({place_of(type(rule).weigh)}); "
            "return a weight for each client, none below 0, and divide by their sum"
        )
    return weights


def fault(weights: object, clients: Sequence[str]) -> str:
    """Why these are no weights of the clients; empty: they are."""
    if not isinstance(weights, dict):
        return f"are a {type(weights).__name__} and no dict"
    if missing := [client for client in clients if client not in weights]:
        return f"lack client {missing[0]!r}"
    for client in clients:
        if not (math.isfinite(weights[client]) and weights[client] >= 0):
            return f"have {float(weights[client]):.4g} for client {client!r}"
    total = math.fsum(weights[client] for client in clients)
    return "" if abs(total - 1) <= ROUNDING else f"sum to {total:.4g}"
