"""Contracts of the server's parts, and what a part may look at: one `ServerRound`.

A part is a frozen dataclass whose fields are a paper's hyper-parameters. What changes from round to round lives in
`ServerRound.state` (numbers, strings, lists) and `ServerRound.arrays` (tensors); both belong to the part alone, are
saved with every checkpoint and come back when a run is resumed.

Order of one round:

    collect, accept, merge (banks `before` training) -> hand_out (banks) -> clients train
    -> accept (banks, for each reply) -> weigh -> fuse -> merge (banks)
    -> visits -> refine (each part in turn) -> make (broadcasts) -> the model is evaluated and saved

What a part refuses of one client is this client's failure, and never the end of the run: `needs` names metrics without
which a reply is refused, `Bank.accept` returns a reason, and every other method may raise `RefusedUpdateError`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from torch import nn

from fedsim.part import Part, part_name
from strategies.server_round import SERVER, Arrays, Cut, Entries, Place, RefusedUpdateError, ServerRound, Update

if TYPE_CHECKING:
    from fedsim.recipe import Recipe

__all__ = [
    "SERVER",
    "Arrays",
    "Bank",
    "Broadcast",
    "Cut",
    "Entries",
    "Fuse",
    "Place",
    "Refine",
    "RefusedUpdateError",
    "ServerRound",
    "Share",
    "Update",
    "Visit",
    "Weights",
]

NO_MODEL = (
    "without the upload of batch norm no model for the unseen domain exists; keep upload = true, or re-estimate the "
    "statistics there with method.infer = 'recompute'"
)


class Share(Part):
    """Which tensors leave the client and which come back.

    partial: clients train on a part of the shared tensors (`cut`); client parts that need the whole are then refused.
    """

    upload: ClassVar[bool] = False  # clients send up what they keep to themselves; a rule may make it a field
    needs_clients: ClassVar[bool] = True
    partial: ClassVar[bool] = False

    def place(self, net: nn.Module) -> dict[str, Place]:
        """Place of every entry of the network's state:

        `shared`: up, fused, down. `upload`: up and fused, so that a model for unseen domains exists, but never loaded
        by a training client. `local`: never leaves the client, which keeps its own. `frozen`: equal everywhere and
        never trained (a pretrained backbone): every process builds it from the weights file and the run's seed, and it
        is never sent, stored, fused or saved.
        """
        raise NotImplementedError

    def cut(self, net: nn.Module, client: str, round: int, seed: int) -> dict[str, Cut]:
        """Which entries of shared tensors go to a client for its training in a round and come back: the kept indices of
        each axis, by name. A tensor that is not named travels whole.

        On the client all other entries are 0; in its update they are those of the round's first model. Server and
        client call it both, with the network (only its layers are looked at) and the run's seed, and must get the same.
        """
        return {}


class Weights(Part):
    """How much each client counts this round.

    adaptive: the weights follow something that is measured; a fusion that does not look at weights would ignore it.
    """

    adaptive: ClassVar[bool] = True
    needs_clients: ClassVar[bool] = True

    def refuses(self, recipe: "Recipe") -> str:
        """Adaptive weights need a fusion that uses them."""
        if recipe.fuse.uses_weights or not self.adaptive:
            return ""
        return (
            f"{part_name(recipe.fuse)} does not look at the clients' weights, so {part_name(self)} would have no "
            "effect; use one of the two"
        )

    def weigh(self, updates: Sequence[Update], server: ServerRound) -> dict[str, float]:
        """Convex weights p_k of the clients that delivered, by client name; they must sum to 1."""
        raise NotImplementedError


class Fuse(Part):
    """How tensors of several clients become one.

    uses_weights: False when the rule weighs clients by itself; weights other than the plain ones are then refused.
    perturbs: True when it adds noise to every tensor, which batch norm does not survive.
    """

    needs_clients: ClassVar[bool] = True
    uses_weights: ClassVar[bool] = True
    perturbs: ClassVar[bool] = False

    def fuse(
        self, updates: Sequence[Update], weights: Mapping[str, float], server: ServerRound
    ) -> dict[str, np.ndarray]:
        """The new global tensors; names, shapes and types as in every update.

        delta_k of the papers is `update.arrays[name] - server.previous[name]`, for the names in `server.parameters`.
        """
        raise NotImplementedError


class Refine(Part):
    """What the server does to the fused model: an optimizer's step, distillation, an average over rounds.

    A recipe may have several; each gets what the one before returned. Rounds in which no client delivered are left out.
    """

    needs_clients: ClassVar[bool] = False

    def refine(self, fused: Arrays, server: ServerRound) -> dict[str, np.ndarray]:
        """The global tensors after this part; names, shapes and types as in `fused`.

        This model is evaluated, compared for the best round and saved, and the next round starts from it unless
        `start` says otherwise. `fused` is read-only: return {**fused, name: new array, ...}.
        """
        raise NotImplementedError

    def start(self, model: Arrays, server: ServerRound) -> Arrays:
        """The tensors from which the clients train in the round that begins, given the model as saved: that model.

        A part whose refined model is only to be evaluated (an average over rounds) returns here what the clients go on
        with. Only `server.state`, `server.arrays` and `server.round` (the round that begins) are filled.
        """
        return model


class Visit(Part):
    """A further exchange of a round, with the unseen domain's client, which holds images without labels.

    The client's answer comes from the recipe's part in the slot `unlabelled`. A visit that fails is that client's
    failure: with `run.on_client_failure = "continue"` the round goes on without its answer (None).

    phase: name of the exchange, by which the client's part knows what is asked, and parts find the answer
        (`server.answers[phase]`, from the moment on at which it came).
    moment: "updates": when the updates have come, before they are weighed; "model": when they are fused and the banks
        are merged, before parts refine.
    records: names of the records that the answer holds, no more and no fewer.
    bank: the one of these records that fills a bank of that name, under the owner SERVER; empty: none.
    """

    phase: ClassVar[str]
    moment: ClassVar[Literal["updates", "model"]]
    records: ClassVar[tuple[str, ...]]
    bank: ClassVar[str] = ""
    needs_clients: ClassVar[bool] = True

    def refuses(self, recipe: "Recipe") -> str:
        """Somebody has to answer."""
        if recipe.unlabelled is not None:
            return ""
        return f"{part_name(self)} needs a part in method.unlabelled that answers it"

    def ask(self, model: Arrays, server: ServerRound) -> Mapping[str, Arrays] | None:
        """The records of the message, `arrays` (a whole model) among them; None: no visit in this round.

        model: what is fused so far; at the moment "updates" it is `server.previous`.
        """
        raise NotImplementedError

    def accept(self, records: Mapping[str, Arrays], server: ServerRound) -> str:
        """Reason why an answer is refused, or an empty string; its values are known to be finite."""
        return ""

    def take(self, records: Mapping[str, Arrays], model: Arrays, server: ServerRound) -> Arrays:
        """The model after the visit; a visit at the moment "updates" does not change it."""
        return model


class Bank(Part):
    """A named record that goes to the clients beside the model, with bytes of its own in the results.

    The server keeps it as {owner: arrays}, in the checkpoint too. Who fills it:

    `contributed` (the default), `when = "once"`: every client contributes before round 1 (client part with
    `bank = name`, its `collect`); then the bank is frozen. Each client gets it with its first train message and keeps
    it. A client that failed to contribute is missing from it and still gets the others'.
    `contributed`, `when = "before"`: in every round, before they train, the drawn clients get the model of the round's
    start and contribute (`collect`); the merged bank goes out with the train messages of the same round. It is a round
    trip more. A client that failed to contribute does not train in this round.
    `contributed`, `when = "round"`: contributions come with the trained models (client parts write
    `round.outbox[name]`), and the merged bank goes out with every train message.
    Not `contributed`: nothing comes from the clients for it; the server takes what it needs from the updates (`gather`)
    or makes it itself (`Broadcast`).

    uniform: contributions of all clients have the same names, types and shapes (their first axis aside); one that
    differs from most others', or from those of earlier rounds, is refused. Set it to False when they rightly differ.
    initial: on a client's first visit its personal tensors (places `upload` and
    `local`) of the same names start from it.
    """

    name: ClassVar[str]
    when: ClassVar[Literal["once", "before", "round"]] = "once"
    contributed: ClassVar[bool] = True
    uniform: ClassVar[bool] = True
    initial: ClassVar[bool] = False
    needs_clients: ClassVar[bool] = True

    def refuses(self, recipe: "Recipe") -> str:
        """A bank that clients contribute to needs a client part that does."""
        if not self.contributed or self.name in recipe.contributors():
            return ""
        return f"no part contributes to {part_name(self)}; take it out of method.banks"

    def accept(self, client: str, arrays: Arrays, server: ServerRound) -> str:
        """Reason why a client's contribution is refused, or an empty string; values are known to be finite.

        `strategies/banks/checks.py` has what most banks need (`fault`, and `misfit` for tensors of the model's shapes).
        """
        raise NotImplementedError

    def gather(self, update: Update, server: ServerRound) -> Arrays:
        """What the bank takes of one update: the client's contribution."""
        return update.records[self.name]

    def merge(self, bank: Entries, entries: Entries, server: ServerRound) -> dict[str, Arrays]:
        """The bank after a round, given the accepted contributions by client: each client's newest one stays.

        What all clients get alike (a sum, a mean, clusters) may be kept under the owner SERVER or in `server.arrays`.
        Called after `fuse` (of a bank `before` training: when its contributions are in), and only in rounds in which a
        client delivered.
        """
        return {**bank, **entries}

    def hand_out(self, bank: Entries, client: str, server: ServerRound) -> Arrays | None:
        """The arrays that `client` gets of the bank (perhaps none, an empty record); None sends no record at all."""
        raise NotImplementedError

    def traffic(self, server: ServerRound) -> tuple[int | None, int | None]:
        """Bytes of this bank's record (down to one client, up from it) in a round, or once for a bank of that kind;
        None where they depend on the data or on what clients have sent. `server.previous` is the initial model."""
        return None, None if self.contributed else 0


class Broadcast(Bank):
    """A record that the server makes by itself and sends to every client with every train message.

    `make` is called at the end of each round in which a client delivered, and once before the first; what it returned
    last is what clients get. Examples: the last global move (FedCM), a gradient's direction, generator weights.
    """

    when: ClassVar[Literal["once", "round"]] = "round"
    contributed: ClassVar[bool] = False

    def make(self, server: ServerRound) -> dict[str, np.ndarray]:
        """The record, from `server.current`, `server.previous`, `server.updates` and `server.arrays`.

        The last global move is `current - previous`, which is zero before the first round.
        """
        raise NotImplementedError

    def traffic(self, server: ServerRound) -> tuple[int | None, int | None]:
        """Unknown before a round has been, unless the record has its full size from the beginning."""
        made = self.make(server)
        return (sum(array.nbytes for array in made.values()) if made else None), 0

    def merge(self, bank: Entries, entries: Entries, server: ServerRound) -> dict[str, Arrays]:
        """Unchanged: `make` fills it."""
        return dict(bank)

    def hand_out(self, bank: Entries, client: str, server: ServerRound) -> Arrays | None:
        """The record as it was made, the same for all clients."""
        return bank.get(SERVER)
