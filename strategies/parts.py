"""Contracts of the server's parts, and what a part may see: one `ServerRound`.

A part is a frozen dataclass, and its fields are the hyper-parameters of a paper. Values that change from round to round
belong in `ServerRound.state` (numbers, strings, lists) and `ServerRound.arrays` (tensors). Both belong to the part
alone, are saved with every checkpoint, and are restored when a run is resumed.

The order of one round:

    collect, accept, merge (banks `before` training) -> hand_out (banks) -> clients train
    -> accept (banks, for each reply) -> collect, accept, merge (banks `after` training)
    -> weigh -> fuse -> merge (banks) -> visits -> refine (each part in turn) -> make (broadcasts)
    -> the model is evaluated and saved

When a part refuses something of one client, this is a failure of the client and never the end of the run. `needs` names
metrics without which a reply is refused. `Bank.accept` and `Visit.accept` return a reason. Every other method that gets
updates, contributions or answers may raise `RefusedUpdateError` with the name of that client (of the unseen domain for
the answer to a visit). With `LostRoundError` a round has no model: the one before stays, or the run ends, as
`run.on_client_failure` says.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np

from fedsim.models.net import Net
from fedsim.parts.facts import Fact, Facts
from fedsim.parts.part import Part
from strategies.bank import Bank, Broadcast, OneForAll, When
from strategies.server_round import (
    SERVER,
    ArrayDict,
    Arrays,
    Cut,
    Entries,
    LostRoundError,
    Place,
    RefusedUpdateError,
    ServerRound,
    Update,
)
from strategies.stored import Head

__all__ = [
    "SERVER",
    "ArrayDict",
    "Arrays",
    "Bank",
    "Broadcast",
    "Compress",
    "Cut",
    "Entries",
    "Fuse",
    "LostRoundError",
    "OneForAll",
    "Place",
    "Refine",
    "RefusedUpdateError",
    "ServerRound",
    "Share",
    "Update",
    "Visit",
    "Weights",
    "When",
]


class Share(Part):
    """Which tensors leave the client and which come back.

    >>> class AllButBiases(Share):
    ...     def place(self, net):
    ...         return {name: "local" if name.endswith("bias") else "shared" for name in net.state_dict()}
    >>> AllButBiases().place(torch.nn.Linear(2, 3))
    {'weight': 'shared', 'bias': 'local'}
    """

    upload: bool = False  # clients also send what they keep to themselves; a rule may make it a field

    @property
    def assumes(self) -> Facts:
        """Several clients share."""
        return (Fact.SEVERAL_CLIENTS,)

    @property
    def partial(self) -> bool:
        """Whether clients train on a part of the shared tensors, because the rule has a `cut` of its own."""
        return type(self).cut is not Share.cut

    @property
    def breaks(self) -> Facts:
        """A part of the model is not the whole."""
        return (Fact.WHOLE_MODEL,) if self.partial else ()

    @property
    def provides(self) -> Facts:
        """Tensors that clients keep but upload."""
        return (Fact.UPLOAD,) if self.upload else ()

    def place(self, net: Net) -> dict[str, Place]:
        """The place of every entry of the network's state.

        - `shared`: sent to the server, fused, and sent to the clients.
        - `upload`: sent to the server and fused, so that a model for unseen domains exists, but never loaded by a
          client that trains.
        - `local`: never leaves the client, which keeps its own.
        - `frozen`: equal everywhere and never trained (a pretrained backbone). Every process builds it from the weights
          file and the run's seed, and it is never sent, stored, fused or saved.

        By default everything is shared.
        """
        return dict.fromkeys(net.state_dict(), "shared")

    def cut(self, net: Net, client: str, round: int, seed: int) -> dict[str, Cut]:
        """The entries of shared tensors that a client gets for its training in a round and sends back, by name.

        For each named tensor these are the kept indices of each axis. A tensor that is not named is sent whole. On the
        client all other entries are 0; in its update they are those of the first model of the round. Server and client
        both call this method, with the network (of which only the layers are used) and the run's seed, and must get the
        same result.
        """
        return {}


class Compress(Part):
    """In which form a client's update travels to the server.

    What is compressed are the moves of the shared parameters, delta = theta_k - theta with the model theta that the
    client received. All else in a reply travels as it is (`strategies/wire/compression.py`). The client calls `encode`,
    and the server `decode`. Both call `form`, whose shapes every reply must have.

    keeps_error: the client adds to its moves what the encoding left out before, and keeps what it leaves out now

        >>> class Signs(Compress):
        ...     def form(self, heads):
        ...         return {name: (shape, np.dtype(np.int8)) for name, (shape, _) in heads.items()}
        ...     def encode(self, moves, rng):
        ...         return {name: np.sign(move).astype(np.int8) for name, move in moves.items()}
        ...     def decode(self, sent, heads):
        ...         return {name: 0.01 * sent[name] for name in heads}
        >>> Signs().encode({"w": np.array([0.5, -2.0])}, None)
        {'w': array([ 1, -1], dtype=int8)}
    """

    keeps_error: ClassVar[bool] = False
    assumes: ClassVar[Facts] = (Fact.SEVERAL_CLIENTS, Fact.SINGLE_UPDATES)

    def form(self, heads: Mapping[str, Head]) -> dict[str, Head]:
        """Shape and type of every encoded tensor, given those of the moves. It depends on nothing else."""
        raise NotImplementedError

    def encode(self, moves: Arrays, rng: np.random.Generator) -> ArrayDict:
        """The moves as they are sent. `rng` is that of the run's seed, the client and the round."""
        raise NotImplementedError

    def decode(self, sent: Arrays, heads: Mapping[str, Head]) -> ArrayDict:
        """The moves that were sent, with the shapes of `heads`; ValueError where they cannot be what a client encoded.

        The tensors in `sent` have the form that `form` gives, and their values are finite.
        """
        raise NotImplementedError


class Weights(Part):
    """How much each client counts in this round; measured, unless a rule says that it breaks nothing.

    >>> class Equal(Weights):
    ...     def weigh(self, updates, server):
    ...         return {update.client: 1 / len(updates) for update in updates}
    >>> updates = [Update("photo", 90, {}), Update("sketch", 10, {})]
    >>> Equal().weigh(updates, ServerRound(1, 5, ["photo", "sketch"], {}))
    {'photo': 0.5, 'sketch': 0.5}
    """

    assumes: ClassVar[Facts] = (Fact.SEVERAL_CLIENTS, Fact.CLIENT_WEIGHTS)
    breaks: ClassVar[Facts] = (Fact.KNOWN_WEIGHTS,)

    def known(self, examples: Mapping[str, int]) -> dict[str, float] | None:
        """The weights of these clients, where numbers of examples are all that they depend on; None elsewhere."""
        return None

    def weigh(self, updates: Sequence[Update], server: ServerRound) -> dict[str, float]:
        """Convex weights p_k of the clients that replied, by client name, with the sum 1; by default the known ones."""
        weights = self.known({update.client: update.examples for update in updates})
        if weights is None:
            raise NotImplementedError
        return weights


class Fuse(Part):
    """How the tensors of several clients become one.

    amplifies: True when a number that one client reports can make the model move much further than every update. A
    model that moves more than `run.update_limit` times as far as the largest update is then refused
    masked: True when updates arrive so that only their sum can be read. No other part gets their tensors, no check
    compares them, and the round cannot be computed again without one of the clients

        >>> class Largest(Fuse):
        ...     def fuse(self, updates, weights, server):
        ...         return {name: np.max([each.arrays[name] for each in updates], axis=0) for name in updates[0].arrays}
        >>> photo, sketch = {"w": np.array([1.0, 5.0])}, {"w": np.array([2.0, 3.0])}
        >>> updates = [Update("photo", 9, photo), Update("sketch", 1, sketch)]
        >>> Largest().fuse(updates, {}, ServerRound(1, 5, ["photo", "sketch"], {}))
        {'w': array([2., 5.])}
    """

    assumes: ClassVar[Facts] = (Fact.SEVERAL_CLIENTS,)
    masked: ClassVar[bool] = False
    amplifies: ClassVar[bool] = False

    @property
    def breaks(self) -> Facts:
        """A rule of its own gives no weighted mean."""
        return (Fact.WEIGHTED_MEAN,)

    def form(self, shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> dict[str, tuple]:
        """The shape and the type of the tensors of a reply, given those of the model; by default the same ones."""
        return dict(shapes)

    def fuse(self, updates: Sequence[Update], weights: Mapping[str, float], server: ServerRound) -> ArrayDict:
        """The new global tensors, with names, shapes and types as in every update.

        delta_k of the papers is `update.arrays[name] - server.previous[name]`, for the names in `server.parameters`.
        """
        raise NotImplementedError


class Refine(Part):
    """What the server does with the fused model: a step of an optimizer, distillation, an average over rounds.

    A recipe may have several such parts; each gets the result of the part before it. They are not called in rounds in
    which no client replied.

    order: which part comes first, however the rows are named: 0 corrects the clients' mean, 1 steps towards it, 2
    puts in what no step may move, 3 trains the new model, 4 averages over rounds; equal numbers in the order of the
    settings' names

        >>> class HalfAStep(Refine):
        ...     def refine(self, fused, server):
        ...         return {name: (server.previous[name] + array) / 2 for name, array in fused.items()}
        >>> HalfAStep().refine({"w": np.array([2.0])}, ServerRound(1, 5, ["photo"], {"w": np.array([0.0])}))
        {'w': array([1.])}
    """

    order: ClassVar[int] = 1
    assumes: ClassVar[Facts] = (Fact.SINGLE_UPDATES,)

    def refine(self, fused: Arrays, server: ServerRound) -> ArrayDict:
        """The global tensors after this part, with names, shapes and types as in `fused`.

        This model is evaluated, compared for the best round and saved. The next round starts from it unless `start`
        returns another model. `fused` is read-only: return {**fused, name: new array, ...}.
        """
        raise NotImplementedError

    def start(self, model: Arrays, server: ServerRound) -> Arrays:
        """The tensors from which the clients train in the next round, given the saved model; by default this model.

        A part that refines a model only for evaluation (an average over rounds) returns here the tensors with which the
        clients continue. Only `server.state`, `server.arrays` and `server.round` (the round that begins) are filled.
        """
        return model


class Visit(Part):
    """A further exchange of a round, with the unseen domain's client, which holds images without labels.

    The client's answer comes from the recipe's part in the slot `unlabelled`. A visit that
    fails is a failure of that client: with `run.on_client_failure = "continue"` the round
    continues without its answer (None).

    phase: the name of the exchange. The client's part reads it to know what is asked, and parts find the answer under
    it (in `server.answers[phase]`, from the moment at which it came)
    moment: "updates" is when the updates have come, before they are weighed; "model" is when they are fused and the
    banks are merged, before parts refine
    records: the names of the records in the answer, no more and no fewer
    bank: the one of these records that fills a bank of that name, under the owner SERVER; empty: none
    """

    phase: ClassVar[str]
    moment: ClassVar[Literal["updates", "model"]]
    records: ClassVar[tuple[str, ...]]
    bank: ClassVar[str] = ""
    assumes: ClassVar[Facts] = (Fact.SEVERAL_CLIENTS, Fact.SINGLE_UPDATES)

    def ask(self, model: Arrays, server: ServerRound) -> Mapping[str, Arrays] | None:
        """The records of the message, with `arrays` (a whole model) among them; None: no visit in this round.

        model: what is fused so far; at the moment "updates" it is `server.previous`
        """
        raise NotImplementedError

    def accept(self, records: Mapping[str, Arrays], server: ServerRound) -> str:
        """The reason why an answer is refused, or an empty string. Its values are known to be finite."""
        return ""

    def take(self, records: Mapping[str, Arrays], model: Arrays, server: ServerRound) -> Arrays:
        """The model after the visit. A visit at the moment "updates" does not change it."""
        return model
