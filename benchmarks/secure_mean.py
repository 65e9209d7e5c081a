"""CPU seconds of secure aggregation and of FedAvg's mean: python benchmarks/secure_mean.py [CLIENTS:VALUES ...]

Measured are every client's exchanges and masking, and the server's sum when the last client fails after it has sent its
shares.
"""

import sys
import time
from dataclasses import dataclass

import numpy as np

from clients.local_round import LocalRound
from clients.reports.masked_update import MaskedUpdate
from clients.store import ClientStore
from fedsim.settings import TrainSettings
from strategies.banks.secure_exchange import KEYS, OPENED, SHARES, SecureKeys, SecureShares, SecureUnmasking
from strategies.fuse.secure_mean import SecureMean
from strategies.fuse.weighted_mean import WeightedMean
from strategies.parts import ServerRound, Update
from strategies.weights.uniform import Uniform

CASES = ("4:11181642", "3:26000", "20:26000", "50:26000")
EXAMPLES = 10


@dataclass(frozen=True)
class Images:
    """A client's data, of which only the number of examples matters."""

    examples: int = EXAMPLES


class SecureRound:
    """The exchanges of one round between clients with EXAMPLES examples each and a server.

    names: of the clients; previous: the tensors of the model with which the round begins
    """

    def __init__(self, clients: int, values: int) -> None:
        self.names = tuple(f"client-{number:04d}" for number in range(clients))
        self.previous = {"w": np.zeros(values, np.float32)}
        self.part = MaskedUpdate()
        self.banks = {bank.name: bank for bank in (SecureKeys(), SecureShares(), SecureUnmasking())}
        self.entries: dict[str, dict[str, dict[str, np.ndarray]]] = {}
        self.stores = {name: ClientStore(None, name) for name in self.names}

    def server(self) -> ServerRound:
        """What the server's parts see."""
        return ServerRound(
            1,
            1,
            list(self.names),
            self.previous,
            banks=self.entries,
            known_weights=Uniform().known,
            places={"w": "shared"},
        )

    def local(self, name: str, asked: str = "", delivered: tuple[str, ...] = ()) -> LocalRound:
        """What the client's part sees of one message."""
        records = {bank: self.banks[bank].hand_out(self.entries[bank], name, self.server()) for bank in self.entries}
        return LocalRound(
            name, None, TrainSettings(), 2, 1, 1, "train", 0, None, self.stores[name], Images(), clients=self.names,
            records={bank: arrays or {} for bank, arrays in records.items()}, asked=asked, delivered=delivered,
            known_weights=Uniform().known,
        )  # fmt: skip

    def ask(self, bank: str, clients: tuple[str, ...], delivered: tuple[str, ...] = ()) -> None:
        """Fills a bank with what these clients contribute."""
        self.entries[bank] = {name: self.part.collect(self.local(name, bank, delivered)) for name in clients}

    def masked(self, name: str, trained: dict[str, np.ndarray]) -> Update:
        """The update of a client under its masks."""
        return Update(name, EXAMPLES, self.part.leave(self.local(name), trained, self.previous))


def measure(clients: int, values: int) -> str:
    """Measure one round of this many clients with this many numbers each."""
    played = SecureRound(clients, values)
    trained = {"w": np.random.default_rng(0).normal(0, 0.01, values).astype(np.float32)}
    names = played.names
    left = names[:-1]  # the last client fails after it has sent its shares
    weights = dict.fromkeys(left, 1 / (clients - 1))

    clock = [time.process_time()]
    played.ask(KEYS, names)
    played.ask(SHARES, names)
    clock.append(time.process_time())
    updates = [played.masked(name, trained) for name in names]
    clock.append(time.process_time())
    played.ask(OPENED, left, left)
    clock.append(time.process_time())
    SecureMean().fuse(updates[:-1], weights, played.server())
    clock.append(time.process_time())
    WeightedMean().fuse([Update(name, EXAMPLES, trained) for name in left], weights, played.server())
    clock.append(time.process_time())

    keys, masks, _, unmask, plain = np.diff(clock)
    return (
        f"{clients} clients, {values} numbers: keys and shares {keys / clients:.3f} s, masks {masks / clients:.3f} s "
        f"a client, server {unmask:.3f} s, FedAvg's mean {plain:.3f} s"
    )


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        print(measure(*map(int, case.split(":"))), flush=True)
