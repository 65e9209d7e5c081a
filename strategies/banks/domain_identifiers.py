"""FADA's domain identifiers, one per source: kept on the server for the target's client."""

from dataclasses import dataclass
from typing import ClassVar

from strategies.banks.checks import fault
from strategies.parts import Arrays, Bank, Entries, ServerRound

LAYOUT = {"0.weight": 2, "0.bias": 1, "2.weight": 2, "2.bias": 1}


@dataclass(frozen=True)
class DomainIdentifiers(Bank):
    """{DI_i}: each source's newest; a source that is not drawn keeps the one that it sent last. Sources get none."""

    name: ClassVar[str] = "domain_identifier"
    when: ClassVar[str] = "round"

    def accept(self, client: str, arrays: Arrays, server: ServerRound) -> str:
        """Refuses what is no identifier: two linear layers."""
        return fault(arrays, LAYOUT)

    def hand_out(self, bank: Entries, client: str, server: ServerRound) -> None:
        """Nothing."""

    def traffic(self, server: ServerRound) -> tuple[int, None]:
        """Nothing down."""
        return 0, None
