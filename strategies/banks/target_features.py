"""Features of the unseen domain's unlabelled images, handed to all clients."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from strategies.parts import SERVER, Arrays, Bank, Entries, ServerRound, Update


@dataclass(frozen=True)
class TargetFeatures(Bank):
    """F_t [m, d], as the last visit of the target's client left them; none before the first (FADA)."""

    name: ClassVar[str] = "target_features"
    when: ClassVar[str] = "round"
    contributed: ClassVar[bool] = False

    def gather(self, update: Update, server: ServerRound) -> Arrays:
        """Nothing of a source."""
        return {}

    def merge(self, bank: Entries, entries: Entries, server: ServerRound) -> Mapping[str, Arrays]:
        """Unchanged: a visit fills it."""
        return dict(bank)

    def hand_out(self, bank: Entries, client: str, server: ServerRound) -> Arrays | None:
        """The features, the same for all clients."""
        return bank.get(SERVER)
