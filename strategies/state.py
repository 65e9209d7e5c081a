"""What the server keeps from round to round beside the global model. All of it is in the checkpoint."""

import copy
from dataclasses import dataclass, field

from fedsim.common.values import JsonTable
from strategies.server_round import ArrayDict, Entries


@dataclass
class ServerState:
    """The state of the server after a finished round.

    parts, tensors: `ServerRound.state` and `ServerRound.arrays` of every part, by the part's key
    banks: every bank by name, as {owner: arrays}
    layouts: the names, types and shapes of a bank's contributions
    handed: the clients that keep a bank which is handed out once
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

    def saved_parts(self) -> tuple[dict, dict]:
        """Copies of the state of the parts, for `restore_parts`."""
        return copy.deepcopy(self.parts), copy.deepcopy(self.tensors)

    def known_kept(self) -> tuple[dict[str, int], dict[str, list[str]]]:
        """Copies of what is known of the clients' own states: `stored` and `handed`."""
        return dict(self.stored), {bank: list(clients) for bank, clients in self.handed.items()}

    def restore_parts(self, saved: tuple[dict, dict]) -> None:
        """Restores what `saved_parts` returned; this may be done several times with the same copies."""
        self.parts, self.tensors = copy.deepcopy(saved)
