"""COPA's bank: the classifier of every client, which the server sends to all of them."""

from dataclasses import dataclass
from typing import ClassVar

from strategies.parts import Arrays, Bank, Entries, ServerRound, Update, When

HEAD = "head."  # the classifier of every network, its attribute `head`


@dataclass(frozen=True)
class Heads(Bank):
    """H = {k: head of theta_k}: the newest classifier of each client, taken from the model that it sends in any case.

    Source: COPA (Wu and Gong, ICCV 2021). Every client gets the heads of all K clients with every train message, as
    `client:tensor`. For a client that has not replied yet, the head of the global model is sent (in the first round the
    initial head for all); its own training starts from the initial head nevertheless. The bank never averages heads.
    """

    name: ClassVar[str] = "heads"
    when: ClassVar[When] = "round"
    contributed: ClassVar[bool] = False
    discloses: ClassVar[str] = (
        "each client's own classifier, every round, to all clients and to the unseen domain (it shows the "
        "directions of the classes in a private domain)"
    )

    def gather(self, update: Update, server: ServerRound) -> Arrays:
        """The head of this client after this round."""
        return {name: array for name, array in update.arrays.items() if name.startswith(HEAD)}

    def hand_out(self, bank: Entries, client: str, server: ServerRound) -> Arrays:
        """The heads of all clients, the same record for each."""
        initial = {name: array for name, array in server.previous.items() if name.startswith(HEAD)}
        heads = [(owner, bank.get(owner, initial)) for owner in server.clients]
        return {f"{owner}:{name}": array for owner, head in heads for name, array in head.items()}

    def traffic(self, server: ServerRound) -> tuple[int, int]:
        """As many heads as there are clients, to each client."""
        return sum(array.nbytes for array in self.hand_out({}, "", server).values()), 0
