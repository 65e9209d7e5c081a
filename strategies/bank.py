"""The contract of banks: records that go to the clients besides the model, and come from them."""

from typing import ClassVar, Literal

from fedsim.parts.facts import Fact, Facts
from fedsim.parts.part import Part
from strategies.server_round import SERVER, ArrayDict, Arrays, Entries, ServerRound, Update

# Records of messages besides those of the banks; a bank of such a name would replace one of them.
RESERVED_RECORDS = frozenset({"arrays", "config", "echo", "metrics", "site", "state"})

When = Literal["once", "before", "after", "round"]


class Bank(Part):
    """A named record that goes to the clients besides the model, with its own bytes in the results.

    The server keeps it as {owner: arrays}, and in the checkpoint. It is filled in one of these ways:

    - `contributed` (the default), `when = "once"`: every client contributes before round 1 (a client part with `bank =
      name`, by its `collect`), and the merged bank does not change any more. Each client gets it with its first train
      message and keeps it. A client that failed to contribute is missing in it, and still gets what the others made.
    - `contributed`, `when = "before"`: in every round, before they train, the drawn clients get the model of the start
      of the round and contribute (`collect`). The merged bank is sent with the train messages of the same round. This
      costs one more exchange. A client that failed to contribute does not train in this round.
    - `contributed`, `when = "after"`: in every round, when the updates have come and before they are weighed, the
      clients that delivered are asked once more, and they are told who delivered (`round.delivered`). This costs one
      more exchange. The update of a client that failed to contribute still counts.
    - `contributed`, `when = "round"`: contributions come with the trained models (client parts call
      `round.send(name, tensors)`), and the merged bank is sent with every train message.
    - Not `contributed`: clients send nothing for it. The server takes what it needs from the updates (`gather`) or
      makes it itself (`Broadcast`).

    A bank with the field `shared` can be turned off by it: it is then neither filled nor sent. The part that
    contributes to it turns it off (`sets`) where its own settings leave it without a use.

    name: the record's name, which no other bank or record of a message has; one client part contributes to it
    uniform: contributions of all clients have the same names, types and shapes (their first axis aside). One that
    differs from those of most others, or from those of earlier rounds, is refused. Set it to False when contributions
    may differ
    reads: the banks whose records are sent with the question of a bank `before` or `after` training
    with_model: the question of a bank `before` training carries the model of the start of the round
    initial: in a client's first round its personal tensors (places `upload` and `local`) of the same names start from
    the bank

        >>> class ImageMeans(Bank):
        ...     name = "image_means"
        ...     def accept(self, client, arrays, server):
        ...         return "" if arrays.keys() == {"mean"} else "it is no mean"
        ...     def hand_out(self, bank, client, server):
        ...         return {owner: arrays["mean"] for owner, arrays in bank.items() if owner != client}
        >>> server = ServerRound(1, 5, ["photo", "sketch"], {})
        >>> bank = ImageMeans().merge({}, {"photo": {"mean": 0.4}, "sketch": {"mean": 0.9}}, server)
        >>> ImageMeans().hand_out(bank, "photo", server)
        {'sketch': 0.9}
    """

    name: ClassVar[str]
    reads: ClassVar[tuple[str, ...]] = ()
    with_model: ClassVar[bool] = True
    uniform: ClassVar[bool] = True
    initial: ClassVar[bool] = False
    shared: bool = True
    assumes: ClassVar[Facts] = (Fact.SEVERAL_CLIENTS, Fact.SINGLE_UPDATES)

    @property
    def when(self) -> When:
        """When the bank is filled: once before round 1, before or after the training of each round, or with it."""
        return "once"

    @property
    def contributed(self) -> bool:
        """Whether clients contribute to the bank."""
        return True

    def accept(self, client: str, arrays: Arrays, server: ServerRound) -> str:
        """The reason why a client's contribution is refused, or an empty string. Its values are known to be finite.

        `strategies/banks/checks.py` has what most banks need (`fault`, and `misfit` for tensors of the model's shapes).
        """
        raise NotImplementedError

    def gather(self, update: Update, server: ServerRound) -> Arrays:
        """The part of one update that the bank takes; by default the client's contribution."""
        return update.records[self.name]

    def compared(self, arrays: Arrays) -> Arrays:
        """The tensors of a contribution whose norm is compared with that of the other clients' contributions.

        By default these are all. A contribution that is a sum over a client's images should return the mean.
        """
        return arrays

    def merge(self, bank: Entries, entries: Entries, server: ServerRound) -> dict[str, Arrays]:
        """The bank after a round, given the accepted contributions by client. By default each client's newest is kept.

        A record that is equal for all clients (a sum, a mean, clusters) may be kept under the owner SERVER or in
        `server.arrays`. The method is called after `fuse` (for a bank that is collected: when its contributions have
        come), and only in rounds in which a client replied; for a bank that comes once, only then. A round whose model
        is dropped leaves bank and arrays as they were.
        """
        return {**bank, **entries}

    def hand_out(self, bank: Entries, client: str, server: ServerRound) -> Arrays | None:
        """The arrays that `client` gets from the bank (perhaps none, an empty record); with None no record is sent."""
        raise NotImplementedError

    def traffic(self, server: ServerRound) -> tuple[int | None, int | None]:
        """Bytes of this bank's record (to one client, from one client) in a round; in total for one that comes once.

        A value is None where the bytes depend on the data or on what clients have sent. `server.previous` is the
        initial model.
        """
        return None, None if self.contributed else 0


class OneForAll(Bank):
    """A bank of which the server makes one record, equal for all clients; `merge` keeps it under the owner SERVER."""

    def hand_out(self, bank: Entries, client: str, server: ServerRound) -> Arrays:
        """That record; empty before there is one."""
        return bank.get(SERVER, {})


class Broadcast(OneForAll):
    """A record that the server makes by itself and sends to every client with every train message.

    `make` is called at the end of each round in which a client replied, and once before the first round. Clients get
    what it returned last. Examples: the last global move (FedCM), the direction of a gradient, generator weights.

        >>> class LastMove(Broadcast):
        ...     name = "last_move"
        ...     def make(self, server):
        ...         return {name: server.current[name] - server.previous[name] for name in server.current}
        >>> LastMove().make(ServerRound(2, 5, ["photo"], {"w": 1.0}, current={"w": 3.0}))
        {'w': 2.0}
    """

    when: ClassVar[When] = "round"
    contributed: ClassVar[bool] = False
    assumes: ClassVar[Facts] = (Fact.SEVERAL_CLIENTS,)

    def make(self, server: ServerRound) -> ArrayDict:
        """The record, from `server.current`, `server.previous`, `server.updates` and `server.arrays`.

        The last global move is `current - previous`, which is zero before the first round.
        """
        raise NotImplementedError

    def traffic(self, server: ServerRound) -> tuple[int | None, int | None]:
        """Unknown before the first round, unless the record has its full size from the beginning."""
        made = self.make(server)
        return (sum(array.nbytes for array in made.values()) if made else None), 0
