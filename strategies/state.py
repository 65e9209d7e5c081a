"""What the server keeps from round to round besides the global model. All of it is in the checkpoint."""

import copy
from dataclasses import dataclass, field

from fedsim.common.values import JsonTable
from strategies.server_round import ArrayDict, Entries

SavedParts = tuple[dict[str, JsonTable], dict[str, ArrayDict]]  # the numbers and the tensors of every part, by its key


@dataclass(frozen=True)
class Snapshot:
    """What a round may change of the server's state, as it was when the round began."""

    parts: SavedParts
    banks: dict[str, Entries]
    layouts: dict[str, str]
    stored: dict[str, int]
    handed: dict[str, list[str]]


@dataclass
class ServerState:
    """The state of the server after a finished round.

    parts, tensors: `ServerRound.state` and `ServerRound.arrays` of every part, by the part's key
    banks: every bank by name, as {owner: arrays}
    layouts: the names, types and shapes of a bank's contributions
    handed: the clients that keep a bank which is handed out once; who fails is taken out
    stored: the round in which a client last stored its state
    """

    parts: dict[str, JsonTable] = field(default_factory=dict)
    tensors: dict[str, ArrayDict] = field(default_factory=dict)
    banks: dict[str, Entries] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)
    handed: dict[str, list[str]] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)

    def of_part(self, key: str) -> tuple[JsonTable, ArrayDict]:
        """A part's own numbers and tensors, which may be changed in place."""
        return self.parts.setdefault(key, {}), self.tensors.setdefault(key, {})

    def snapshot(self) -> Snapshot:
        """What `restore` needs to take back all that a round changes."""
        handed = {bank: list(clients) for bank, clients in self.handed.items()}
        return Snapshot(self.saved_parts(), dict(self.banks), dict(self.layouts), dict(self.stored), handed)

    def restore(self, before: Snapshot) -> None:
        """Takes back what a round has changed; this may be done several times with the same snapshot.

        A client that has failed since then stays out of `handed`, because it may have lost what it kept.
        """
        self.restore_parts(before.parts)
        self.banks, self.layouts, self.stored = dict(before.banks), dict(before.layouts), dict(before.stored)
        now, self.handed = self.handed, {}
        for bank, clients in before.handed.items():
            self.handed[bank] = [client for client in clients if client in now.get(bank, ())]

    def take_over(self, other: "ServerState") -> None:
        """Becomes a state that was saved, when a run is resumed."""
        vars(self).update(vars(other))

    def saved_parts(self) -> SavedParts:
        """Copies of the state of the parts, for `restore_parts`."""
        return copy.deepcopy(self.parts), copy.deepcopy(self.tensors)

    def restore_parts(self, saved: SavedParts) -> None:
        """Restores what `saved_parts` returned; this may be done several times with the same copies."""
        self.parts, self.tensors = copy.deepcopy(saved)
