"""The clients that take part: those that train in a round, and those that validate its model."""

from collections.abc import Sequence

from fedsim.common.seeding import numpy_rng
from fedsim.settings import TrainSettings


def trainers(train: TrainSettings, clients: Sequence[str], seed: int, round: int) -> list[str]:
    """The clients drawn for a round: `train.clients_per_round` without replacement, in the order of the domains."""
    return _some(clients, train.clients_per_round, seed, "clients", round)


def validators(train: TrainSettings, clients: Sequence[str], drawn: Sequence[str], seed: int, round: int) -> list[str]:
    """The clients that validate the model of a round, in the order of the domains; none in a round without validation.

    train.evaluate_clients: `all`; `drawn` for those that trained in the round, which change from round to round; or a
    number of clients that are drawn once and stay the same, so that rounds are compared on the same images
    train.evaluate_every: k validates in the rounds k, 2k, ... and in the last one
    """
    if round % train.evaluate_every and round != train.rounds:
        return []
    if train.evaluate_clients == "all":
        return list(clients)
    if train.evaluate_clients == "drawn":
        return list(drawn)
    return _some(clients, int(train.evaluate_clients), seed, "validators")


def _some(clients: Sequence[str], count: int, seed: int, *stream: str | int) -> list[str]:
    if count == 0 or count >= len(clients):
        return list(clients)
    chosen = numpy_rng(seed, *stream).choice(len(clients), count, replace=False)
    return [clients[index] for index in sorted(chosen)]
