"""FADA's domain identifiers, one per source, which the server keeps for the target's client."""

from dataclasses import dataclass
from typing import ClassVar

from strategies.banks.checks import fault
from strategies.parts import Arrays, Bank, Entries, ServerRound, When

LAYOUT = {"0.weight": 2, "0.bias": 1, "2.weight": 2, "2.bias": 1}


@dataclass(frozen=True)
class DomainIdentifiers(Bank):
    """{DI_i}: the newest of each source, also of one that is not drawn. Sources receive none.

    Identifiers that come before there are features of the target are not kept, because they are not trained yet.
    """

    name: ClassVar[str] = "domain_identifier"
    when: ClassVar[When] = "round"

    def accept(self, client: str, arrays: Arrays, server: ServerRound) -> str:
        """Refuses records other than an identifier, which has two linear layers."""
        return fault(arrays, LAYOUT)

    def merge(self, bank: Entries, entries: Entries, server: ServerRound) -> dict[str, Arrays]:
        """The bank with the newest identifiers, if they were trained."""
        return {**bank, **entries} if server.banks.get("target_features") else dict(bank)

    def hand_out(self, bank: Entries, client: str, server: ServerRound) -> None:
        """Nothing."""

    def traffic(self, server: ServerRound) -> tuple[int, None]:
        """No bytes to the clients; the bytes from them depend on the model."""
        return 0, None
