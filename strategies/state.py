"""What the server remembers from round to round, beside the global model: all of it is in the checkpoint."""

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class ServerState:
    """State of the server after a finished round.

    parts, tensors: `ServerRound.state` and `ServerRound.arrays` of every part, by the part's key.
    banks: every bank by name, as {owner: arrays}. layouts: names, types and shapes of a bank's contributions.
    handed: clients that keep a bank which is handed out once. stored: round in which a client last kept state.
    """

    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    tensors: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    banks: dict[str, dict[str, dict[str, np.ndarray]]] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)
    handed: dict[str, list[str]] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)

    def of_part(self, key: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """A part's own numbers and tensors, to be changed in place."""
        return self.parts.setdefault(key, {}), self.tensors.setdefault(key, {})

    def saved_parts(self) -> tuple[dict, dict]:
        """Copies of what the parts hold, for `restore_parts`."""
        return copy.deepcopy(self.parts), copy.deepcopy(self.tensors)

    def restore_parts(self, saved: tuple[dict, dict]) -> None:
        """Put back what `saved_parts` returned; it may be used again."""
        self.parts, self.tensors = copy.deepcopy(saved)
