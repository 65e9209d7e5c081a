"""Features of the unseen domain's unlabelled images, sent to all clients."""

from dataclasses import dataclass
from typing import ClassVar

from strategies.parts import SERVER, Arrays, Bank, Entries, ServerRound, Update, When


@dataclass(frozen=True)
class TargetFeatures(Bank):
    """F_t [m, d], features of target images from the last visit to the target's client; none before the first visit.

    Source: FADA (Peng et al., ICLR 2020).
    """

    name: ClassVar[str] = "target_features"
    when: ClassVar[When] = "round"
    contributed: ClassVar[bool] = False

    def gather(self, update: Update, server: ServerRound) -> Arrays:
        """Sources contribute nothing."""
        return {}

    def merge(self, bank: Entries, entries: Entries, server: ServerRound) -> dict[str, Arrays]:
        """No change: visits fill this bank."""
        return dict(bank)

    def hand_out(self, bank: Entries, client: str, server: ServerRound) -> Arrays | None:
        """The features, equal for all clients."""
        return bank.get(SERVER)
