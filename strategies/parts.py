"""Contracts of the server's parts.

A part is a frozen dataclass whose fields are a paper's hyper-parameters. What changes from round to round lives in
`ServerRound.state`, a JSON-able dict per part that the strategy checkpoints.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from torch import nn

from fedsim.part import Part, part_name

if TYPE_CHECKING:
    from fedsim.recipe import Recipe

Arrays = Mapping[str, np.ndarray]
Place = Literal["shared", "upload", "local", "frozen"]
NO_MODEL = (
    "without the upload of batch norm no model for the unseen domain exists; keep upload = true, or re-estimate the "
    "statistics there with method.infer = 'recompute'"
)
MIRROR = "global_bn"  # record of the averages that a mirroring share rule also sends down, to be read only


@dataclass
class Update:
    """One client's validated reply to a train message."""

    client: str
    examples: int
    arrays: Arrays
    metrics: dict[str, float] = field(default_factory=dict)
    records: dict[str, Arrays] = field(default_factory=dict)
    stored: int = 0  # entries of client state that it keeps on its side


@dataclass
class ServerRound:
    """What a server part may look at: the round, the global model it started from and the part's own state."""

    round: int
    rounds: int
    clients: list[str]
    previous: Arrays
    state: dict[str, Any]
    details: list[dict[str, Any]] = field(default_factory=list)
    client_columns: dict[str, dict[str, float]] = field(default_factory=dict)

    def detail(self, client: str, quantity: str, name: str, value: float) -> None:
        """Record a layer-wise quantity of one client for details.csv."""
        self.details.append({"client": client, "quantity": quantity, "name": name, "value": float(value)})


class Share(Part):
    """Which tensors leave the client and which come back.

    starts_from: name of a record with tensors from which a client's own (places `upload` and `local`) start when it
    trains for the first time; empty: they start from the initial model.
    """

    starts_from: ClassVar[str] = ""

    needs_clients: ClassVar[bool] = True

    @property
    def mirrors(self) -> bool:
        """Whether the averages of `upload` tensors also come down, in a record that is only read."""
        return False

    def place(self, net: nn.Module) -> dict[str, Place]:
        """Place of every state entry: `shared` (up, averaged, down), `upload` (up and averaged, so that a model for
        unseen domains exists, but never loaded by a training client), `local` (never leaves the client, which keeps
        it) or `frozen` (equal everywhere: neither trained, sent, stored nor averaged, but rebuilt from the weight file
        and the run's seed)."""
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
        """Convex weights of the clients that delivered, by client name."""
        raise NotImplementedError


class Fuse(Part):
    """How tensors of several clients become one."""

    needs_clients: ClassVar[bool] = True
    uses_weights: ClassVar[bool] = True
    perturbs: ClassVar[bool] = False  # adds noise to every tensor, which batch norm does not survive

    def fuse(
        self, updates: Sequence[Update], weights: Mapping[str, float], server: ServerRound
    ) -> dict[str, np.ndarray]:
        """The new global tensors; keys, shapes and dtypes as in every update."""
        raise NotImplementedError


class Bank(Part):
    """A named record collected from the clients and handed out to them, beside the model and with bytes of its own.

    `when = "once"`: collected from every client before round 1, then frozen; each client gets it with its first train
    message and keeps it. A client that failed to contribute is missing from it and still gets the others'.
    `when = "round"`: contributions ride on the trained models, and the merged bank on every train message.
    """

    name: ClassVar[str]
    when: ClassVar[Literal["once", "round"]] = "once"
    needs_clients: ClassVar[bool] = True

    def refuses(self, recipe: "Recipe") -> str:
        """A bank needs a client part that contributes to it."""
        if self.name in recipe.contributors():
            return ""
        return f"no part contributes to {part_name(self)}; take it out of method.banks"

    def accept(self, client: str, arrays: Arrays) -> str:
        """Reason why a client's contribution is refused, or an empty string."""
        raise NotImplementedError

    def merge(self, bank: Mapping[str, Arrays], entries: Mapping[str, Arrays]) -> dict[str, Arrays]:
        """The bank after a round's accepted contributions; by default each client's newest one stays."""
        return {**bank, **entries}

    def hand_out(self, bank: Mapping[str, Arrays], client: str) -> dict[str, np.ndarray]:
        """The arrays that `client` gets of the bank {client: arrays}."""
        raise NotImplementedError
