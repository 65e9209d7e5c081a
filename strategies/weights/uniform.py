"""All clients that replied have equal weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from strategies.parts import ServerRound, Update, Weights


@dataclass(frozen=True)
class Uniform(Weights):
    """p_k = 1/|U_t| over the clients that replied (FedSB, ICASSP 2025)."""

    adaptive: ClassVar[bool] = False
    needs_clients: ClassVar[bool] = False

    def weigh(self, updates: Sequence[Update], server: ServerRound) -> dict[str, float]:
        """Equal shares."""
        return {update.client: 1.0 / len(updates) for update in updates}
