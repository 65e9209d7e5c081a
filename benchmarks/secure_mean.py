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


def measure(clients: int, values: int) -> str:
    """Measure one round of this many clients with this many numbers each."""
    names = [f"client-{number:04d}" for number in range(clients)]
    previous = {"w": np.zeros(values, np.float32)}
    trained = {"w": np.random.default_rng(0).normal(0, 0.01, values).astype(np.float32)}
    part, banks = MaskedUpdate(), {bank.name: bank for bank in (SecureKeys(), SecureShares(), SecureUnmasking())}
    stores, entries = {name: ClientStore(None, name) for name in names}, {}
    known = Uniform().known

    def server() -> ServerRound:
        return ServerRound(1, 1, names, previous, banks=entries, known_weights=known, places={"w": "shared"})

    def local(name: str, asked: str = "", delivered: tuple[str, ...] = ()) -> LocalRound:
        records = {bank: banks[bank].hand_out(entries[bank], name, server()) or {} for bank in entries}
        return LocalRound(
            name, None, TrainSettings(), 2, 1, 1, "train", 0, None, stores[name], Images(), clients=tuple(names),
            records=records, asked=asked, delivered=delivered, known_weights=known,
        )  # fmt: skip

    def ask(bank: str, who: list[str], delivered: tuple[str, ...] = ()) -> None:
        entries[bank] = {name: part.collect(local(name, bank, delivered)) for name in who}

    clock = [time.process_time()]
    ask(KEYS, names)
    ask(SHARES, names)
    clock.append(time.process_time())
    updates = [Update(name, EXAMPLES, part.leave(local(name), trained, previous)) for name in names][:-1]
    clock.append(time.process_time())
    ask(OPENED, names[:-1], tuple(names[:-1]))
    clock.append(time.process_time())
    weights = dict.fromkeys(names[:-1], 1 / (clients - 1))
    SecureMean().fuse(updates, weights, server())
    clock.append(time.process_time())
    WeightedMean().fuse([Update(name, EXAMPLES, trained) for name in names[:-1]], weights, server())
    clock.append(time.process_time())
    keys, masks, _, unmask, plain = np.diff(clock)
    return (
        f"{clients} clients, {values} numbers: keys and shares {keys / clients:.3f} s, masks {masks / clients:.3f} s "
        f"a client, server {unmask:.3f} s, FedAvg's mean {plain:.3f} s"
    )


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        print(measure(*map(int, case.split(":"))), flush=True)
