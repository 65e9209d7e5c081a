"""A federation of a few clients on tensors that goes through the exchanges of secure aggregation."""

from types import SimpleNamespace

import numpy as np

from clients.local_round import LocalRound
from clients.reports.masked_update import MaskedUpdate
from clients.store import ClientStore
from fedsim.settings import TrainSettings
from strategies.banks.secure_exchange import KEYS, OPENED, SHARES, SecureKeys, SecureShares, SecureUnmasking
from strategies.fuse.secure_mean import SecureMean
from strategies.fuse.weighted_mean import WeightedMean
from strategies.parts import ServerRound, Update
from strategies.weights.by_examples import ByExamples

PREVIOUS = {"w": np.full((40, 3), 0.5, np.float32), "b": np.float32(-1.0), "n": np.array(7, np.int64)}


class Federation:
    def __init__(self, examples, weights=None, folder=None, **fields) -> None:
        self.names = list("abcdefgh"[: len(examples)])
        self.examples = dict(zip(self.names, examples))
        self.fuse, self.part = SecureMean(**fields), MaskedUpdate(**fields)
        self.weights = weights or ByExamples()
        self.stores = {name: ClientStore(folder and folder / name, name) for name in self.names}
        self.banks = {KEYS: SecureKeys(), SHARES: SecureShares(), OPENED: SecureUnmasking()}
        self.entries = {}
        self.train = TrainSettings()

    def server(self) -> ServerRound:
        counts = {name: (count,) for name, count in self.examples.items()}
        return ServerRound(1, 3, self.names, PREVIOUS, banks=self.entries, class_counts=counts,
                           known_weights=self.weights.known, places=dict.fromkeys(PREVIOUS, "shared"))  # fmt: skip

    def local(self, name: str, asked: str = "", delivered=(), records=None) -> LocalRound:
        if records is None:
            records = {bank: self.banks[bank].hand_out(entries, name, self.server()) or {}
                       for bank, entries in self.entries.items()}  # fmt: skip
        if (folder := self.stores[name]._folder) is not None:
            self.stores[name] = ClientStore(folder, name)
        return LocalRound(
            name, None, self.train, 3, 1, 3, "train", 0, None, self.stores[name],
            SimpleNamespace(examples=self.examples[name]),
            clients=tuple(self.names), asked=asked, delivered=tuple(delivered), records=records,
            known_weights=self.weights.known,
        )  # fmt: skip

    def ask(self, bank: str, names, delivered=()) -> None:
        found = {name: self.part.collect(self.local(name, bank, delivered)) for name in names}
        for name, arrays in found.items():
            assert self.banks[bank].accept(name, arrays, self.server()) == ""
        self.entries[bank] = self.banks[bank].merge({}, found, self.server())

    def reply(self, name: str, trained) -> Update:
        return Update(name, self.examples[name], self.part.leave(self.local(name), trained, PREVIOUS))

    def begin(self) -> "Federation":
        self.ask(KEYS, self.names)
        self.ask(SHARES, self.names)
        return self

    def end(self, updates) -> dict[str, np.ndarray]:
        delivered = [update.client for update in updates]
        self.ask(OPENED, delivered, delivered)
        return self.fused(updates)

    def fused(self, updates) -> dict[str, np.ndarray]:
        return self.fuse.fuse(updates, self.weights.weigh(updates, self.server()), self.server())


def models(names) -> dict[str, dict[str, np.ndarray]]:
    rng, found = np.random.default_rng(0), {}
    for place, name in enumerate(names):
        w = (PREVIOUS["w"] + rng.normal(0, 1.5, (40, 3))).astype(np.float32)
        found[name] = {"w": w, "b": np.float32(rng.normal()), "n": np.array(7 + place, np.int64)}
    return found


def plain(updates, trained, weights) -> dict[str, np.ndarray]:
    open_updates = [Update(update.client, update.examples, trained[update.client]) for update in updates]
    server = ServerRound(1, 3, [], PREVIOUS)
    return WeightedMean().fuse(open_updates, weights.weigh(open_updates, server), server)
