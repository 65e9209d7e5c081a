"""Contracts of the server's parts, and what a part may look at: one `ServerRound`.

A part is a frozen dataclass whose fields are a paper's hyper-parameters. What changes from round to round lives in
`ServerRound.state` (numbers, strings, lists) and `ServerRound.arrays` (tensors); both belong to the part alone, are
saved with every checkpoint and come back when a run is resumed.

Order of one round:

    hand_out (banks) -> clients train -> accept (banks, for each reply) -> weigh -> fuse -> merge (banks)
    -> refine (each part in turn) -> make (broadcasts) -> the model is evaluated and saved

What a part refuses of one client is this client's failure, and never the end of the run: `needs` names metrics without
which a reply is refused, `Bank.accept` returns a reason, and every other method may raise `RefusedUpdateError`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import nn

from fedsim.arrays import Kind
from fedsim.experiment import TrainSettings
from fedsim.part import Part, part_name
from fedsim.seeding import numpy_rng, torch_generator

if TYPE_CHECKING:
    from fedsim.recipe import Recipe

Arrays = Mapping[str, np.ndarray]
Entries = Mapping[str, Arrays]  # what a bank holds: arrays by owner, which is a client or SERVER
Place = Literal["shared", "upload", "local", "frozen"]
NO_MODEL = (
    "without the upload of batch norm no model for the unseen domain exists; keep upload = true, or re-estimate the "
    "statistics there with method.infer = 'recompute'"
)
CPU = torch.device("cpu")
SERVER = "server"  # owner of a bank's entry that the server made itself; no client has this name


class RefusedUpdateError(Exception):
    """A part refuses what one client sent: the round is computed again without it, as `run.on_client_failure` says."""

    def __init__(self, client: str, reason: str) -> None:
        super().__init__(f"{client}: {reason}")
        self.client, self.reason = client, reason


class Reported(dict):
    """What a client reported, by name: a name that is missing is that client's failure, not the server's."""

    def __init__(self, client: str, kind: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.client, self.kind = client, kind

    def __missing__(self, name: str) -> Any:
        raise RefusedUpdateError(self.client, f"its reply lacks the {self.kind} {name!r}")


@dataclass
class Update:
    """One client's reply to a train message, checked: names, shapes, types and finite values are as expected.

    arrays: the tensors that it trained (places `shared` and `upload`). metrics: numbers that it reported, `train_loss`
    among them. records: its contributions to the banks of every round, by the bank's name.
    A metric or record that is missing raises RefusedUpdateError when it is read with [].
    """

    client: str
    examples: int
    arrays: Arrays
    metrics: dict[str, float] = field(default_factory=dict)
    records: dict[str, Arrays] = field(default_factory=dict)
    stored: int = 0  # entries of client state that it keeps on its side

    def __post_init__(self) -> None:
        self.metrics = Reported(self.client, "metric", self.metrics)
        self.records = Reported(self.client, "record", self.records)


def no_net() -> nn.Module:
    """Stands for `ServerRound.build_net` where a round was made without an experiment (in tests of single parts)."""
    raise RuntimeError("this ServerRound was made without a network")


@dataclass
class ServerRound:
    """What a server part may look at in one round. Nothing here may be changed but `state`, `arrays` and the records.

    round: number of the round, from 1 (0 before the first). rounds: how many the run has.
    clients: names of all clients of the federation, in domain order (N of the papers is `len(clients)`).
    previous: the global tensors from which this round started, by name (theta^(t-1)); read-only.
    state: this part's own numbers, a dict that JSON can hold.
    drawn: names of the clients that take part in this round, in domain order.
    updates: the replies that count, in domain order (K of the papers is `len(updates)`); empty in `hand_out`, and in a
        `make` before the first round. One that another part refuses is not among them.
    current: the global tensors from which the next round starts; in `make` alone they differ from `previous`.
    weights: what `weigh` returned, by client; empty before.
    banks: all banks of the recipe by name, each as {owner: arrays}.
    places: place of every tensor of the network (see Share.place).
    kinds: kind of every tensor by the type of its module: weight, batch-norm affine or statistics, counter.
    parameters: names of the shared tensors that are parameters, by the type of their module. A server that moves the
        model moves these: everything else is a buffer (running statistics, counters) or a client's own and keeps the
        fused value.
    arrays: this part's own tensors, {name: array}. Keep here whatever has the size of a model. Assign or change in
        place as you like: when a client is refused, all of it goes back to what it was at the beginning of the round.
    train: the settings of [train], as `lr` and `momentum` of the local steps.
    device: where a part that trains puts its network.
    build_net: makes a fresh network of the experiment on `device`, with the initial weights of the run's seed.
    """

    round: int
    rounds: int
    clients: list[str]
    previous: Arrays
    state: dict[str, Any] = field(default_factory=dict)
    drawn: list[str] = field(default_factory=list)
    updates: Sequence[Update] = ()
    current: Arrays = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    banks: Mapping[str, Entries] = field(default_factory=dict)
    places: Mapping[str, Place] = field(default_factory=dict)
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    seed: int = 0
    train: TrainSettings = field(default_factory=TrainSettings)
    device: torch.device = CPU
    build_net: Callable[[], nn.Module] = no_net
    details: list[dict[str, Any]] = field(default_factory=list)
    client_columns: dict[str, dict[str, float]] = field(default_factory=dict)

    def rng(self, purpose: str) -> np.random.Generator:
        """NumPy generator of (run's seed, purpose, round): the same at every call, also after a resume."""
        return numpy_rng(self.seed, "server", purpose, self.round)

    def generator(self, purpose: str) -> torch.Generator:
        """CPU torch generator of (run's seed, purpose, round): the same at every call, also after a resume."""
        return torch_generator(self.seed, "server", purpose, self.round)

    def detail(self, client: str, quantity: str, name: str, value: float) -> None:
        """Record a quantity of one client (and one layer, `name`) for details.csv."""
        self.details.append({"client": client, "quantity": quantity, "name": name, "value": float(value)})

    def of_part(self, state: dict[str, Any], arrays: dict[str, np.ndarray]) -> "ServerRound":
        """The same round as one part sees it, with the state that is its own."""
        return replace(self, state=state, arrays=arrays)


class Share(Part):
    """Which tensors leave the client and which come back."""

    needs_clients: ClassVar[bool] = True

    def place(self, net: nn.Module) -> dict[str, Place]:
        """Place of every entry of the network's state:

        `shared`: up, fused, down. `upload`: up and fused, so that a model for unseen domains exists, but never loaded
        by a training client. `local`: never leaves the client, which keeps its own. `frozen`: equal everywhere and
        never trained (a pretrained backbone): every process builds it from the weights file and the run's seed, and it
        is never sent, stored, fused or saved.
        """
        raise NotImplementedError


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


class Bank(Part):
    """A named record that goes to the clients beside the model, with bytes of its own in the results.

    The server keeps it as {owner: arrays}, in the checkpoint too. Who fills it:

    `contributed` (the default), `when = "once"`: every client contributes before round 1 (client part with
    `bank = name`, its `collect`); then the bank is frozen. Each client gets it with its first train message and keeps
    it. A client that failed to contribute is missing from it and still gets the others'.
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
    when: ClassVar[Literal["once", "round"]] = "once"
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
        Called after `fuse`, and only in rounds in which a client delivered.
        """
        return {**bank, **entries}

    def hand_out(self, bank: Entries, client: str, server: ServerRound) -> Arrays | None:
        """The arrays that `client` gets of the bank (perhaps none, an empty record); None sends no record at all."""
        raise NotImplementedError


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

    def merge(self, bank: Entries, entries: Entries, server: ServerRound) -> dict[str, Arrays]:
        """Unchanged: `make` fills it."""
        return dict(bank)

    def hand_out(self, bank: Entries, client: str, server: ServerRound) -> Arrays | None:
        """The record as it was made, the same for all clients."""
        return bank.get(SERVER)
