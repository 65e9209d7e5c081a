"""The clients that take part: those that train in a round, and those that validate its model."""

from collections.abc import Callable, Sequence

from fedsim.common.seeding import numpy_rng
from fedsim.settings import TrainSettings

EVERYONE = "*"  # the clients that `train.availability` does not name


def trainers(train: TrainSettings, clients: Sequence[str], seed: int, round: int) -> list[str]:
    """The clients drawn for a round: `train.clients_per_round` without replacement, in the order of the domains.

    They are drawn among those that are there.
    """
    clients = present(train, clients, seed, round)
    return _some(clients, train.clients_per_round, seed, "clients", round)


def validators(train: TrainSettings, clients: Sequence[str], drawn: Sequence[str], seed: int, round: int) -> list[str]:
    """The clients that validate the model of a round, in the order of the domains; none in a round without validation.

    train.evaluate_clients: `all`; `drawn` for those that trained in the round, which change from round to round; or a
    number of clients that are drawn once and stay the same, so that rounds are compared on the same images
    train.evaluate_every: k validates in the rounds k, 2k, ... and in the last one

    Those that are not there in the round are left out.
    """
    if round % train.evaluate_every and round != train.rounds:
        return []
    chosen = list(clients)
    if train.evaluate_clients == "drawn":
        chosen = list(drawn)
    elif train.evaluate_clients != "all":
        chosen = _some(clients, int(train.evaluate_clients), seed, "validators")
    there = present(train, clients, seed, round)
    return [client for client in chosen if client in there]


def present(train: TrainSettings, clients: Sequence[str], seed: int, round: int) -> list[str]:
    """The clients that are there in a round, in the order of the domains; all without `train.availability`.

    A client is there when its own number of the round, uniform in [0, 1), is below its probability. The numbers depend
    on seed, client and round alone. Where nobody is there, the server waits for the one that lacks least.
    """
    if not train.availability:
        return list(clients)
    return _at_least_one(
        clients, lambda client: _number(seed, "available", client, round) - chance(train, client, round)
    )


def lost(train: TrainSettings, clients: Sequence[str], seed: int, round: int) -> list[str]:
    """Those of the clients that are gone before their reply arrives; never all of them (`train.lost_replies`)."""
    if not train.lost_replies:
        return []
    arrived = _at_least_one(clients, lambda client: train.lost_replies - _number(seed, "lost reply", client, round))
    return [client for client in clients if client not in arrived]


def chance(train: TrainSettings, client: str, round: int) -> float:
    """The probability that a client is there in a round from 1 on; 1 where `train.availability` names it nowhere."""
    for name in (client, client.partition("/")[0], EVERYONE):
        chances = train.availability.get(name)
        if chances:
            return chances[(round - 1) % len(chances)]
    return 1.0


def _at_least_one(clients: Sequence[str], lack: Callable[[str], float]) -> list[str]:
    """The clients that lack less than nothing, or else the first that lacks least."""
    lacking = {client: lack(client) for client in clients}
    chosen = [client for client in clients if lacking[client] < 0]
    return chosen or [client for client in clients if client == min(lacking, key=lacking.__getitem__)]


def _number(seed: int, *stream: str | int) -> float:
    """A number of its own stream, uniform in [0, 1)."""
    return float(numpy_rng(seed, *stream).random())


def _some(clients: Sequence[str], count: int, seed: int, *stream: str | int) -> list[str]:
    if count == 0 or count >= len(clients):
        return list(clients)
    chosen = numpy_rng(seed, *stream).choice(len(clients), count, replace=False)
    return [clients[index] for index in sorted(chosen)]
