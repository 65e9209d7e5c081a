"""Every client's classifier, which the server hands to all of them (COPA)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from strategies.parts import Arrays, Bank, Entries, ServerRound, Update

HEAD = "head."  # the classifier of every network, its attribute `head`


@dataclass(frozen=True)
class Heads(Bank):
    """H = {k: head of theta_k}: each client's newest classifier, taken from the model that it sends up anyway.

    COPA (Wu and Gong, ICCV 2021); baselines.md B.9. Every client gets the heads of all K clients with every train
    message, as `client:tensor`; one that has not delivered yet stands there with the head of the global model (in the
    first round all of them, with the initial one). Never averaged here.
    """

    name: ClassVar[str] = "heads"
    when: ClassVar[Literal["once", "round"]] = "round"
    contributed: ClassVar[bool] = False

    @property
    def discloses(self) -> str:
        """The heads are those of single clients."""
        return (
            "each client's own classifier, every round, to all clients and to the unseen domain (the directions of the "
            "classes in a private domain can be read off it)"
        )

    def gather(self, update: Update, server: ServerRound) -> Arrays:
        """The client's head of this round."""
        return {name: array for name, array in update.arrays.items() if name.startswith(HEAD)}

    def hand_out(self, bank: Entries, client: str, server: ServerRound) -> Arrays:
        """The heads of all clients, the same record for each."""
        initial = {name: array for name, array in server.previous.items() if name.startswith(HEAD)}
        return {
            f"{owner}:{name}": array for owner in server.clients for name, array in bank.get(owner, initial).items()
        }

    def traffic(self, server: ServerRound) -> tuple[int, int]:
        """As many heads as there are clients, down."""
        return sum(array.nbytes for array in self.hand_out({}, "", server).values()), 0
