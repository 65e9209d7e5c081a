"""What a server part may see in one round: the accepted replies, and one `ServerRound`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np
import torch

from fedsim.common.seeding import numpy_rng, torch_generator
from fedsim.common.values import JsonTable, Row
from fedsim.models.net import Net
from fedsim.settings.experiment import Experiment
from fedsim.tensors.kinds import Kind
from strategies.aggregate import ArrayDict, Arrays

Entries = Mapping[str, Arrays]  # the content of a bank: arrays by owner, which is a client or SERVER
Place = Literal["shared", "upload", "local", "frozen"]
Cut = tuple[np.ndarray | None, ...]  # kept indices of each axis of a tensor; None: the whole axis
CPU = torch.device("cpu")
V = TypeVar("V")
SERVER = ""  # owner of a bank's entry that the server made itself; no client has an empty name


class RefusedUpdateError(Exception):
    """A part refuses what one client sent. The round is computed again without it, as `run.on_client_failure` says.

    >>> raise RefusedUpdateError("photo", "its mean is negative")
    Traceback (most recent call last):
        ...
    strategies.server_round.RefusedUpdateError: photo: its mean is negative
    """

    def __init__(self, client: str, reason: str) -> None:
        super().__init__(f"{client}: {reason}")
        self.client, self.reason = client, reason


class LostRoundError(Exception):
    """No model can be computed from what the clients sent in this round; the text says why."""


class Reported(dict[str, V]):
    """What a client reported, by name. A missing name is a failure of that client, and not of the server."""

    def __init__(self, client: str, kind: str, values: Mapping[str, V]) -> None:
        super().__init__(values)
        self.client, self.kind = client, kind

    def __missing__(self, name: str) -> V:
        raise RefusedUpdateError(self.client, f"its reply lacks the {self.kind} {name!r}")


@dataclass
class Update:
    """One client's reply to a train message after the checks: names, shapes and types fit, and values are finite.

    arrays: the tensors that it trained (places `shared` and `upload`)
    metrics: the numbers that it reported, with `train_loss` among them
    records: its contributions to the banks of every round, by the bank's name

    Where a round's tensors do not fit into memory, `arrays` and the records read a tensor from a file each time that it
    is asked for: a part that goes through them tensor by tensor needs little memory with any number of clients. They
    can be read until the round ends. Reading a missing metric or record with [] raises RefusedUpdateError.

        >>> update = Update("photo", 90, {"w": np.zeros(2)}, {"train_loss": 0.7})
        >>> update.metrics["train_loss"]
        0.7
        >>> update.metrics["gap"]
        Traceback (most recent call last):
            ...
        strategies.server_round.RefusedUpdateError: photo: its reply lacks the metric 'gap'
    """

    client: str
    examples: int
    arrays: Arrays
    metrics: dict[str, float] = field(default_factory=dict)
    records: dict[str, Arrays] = field(default_factory=dict)
    stored: int = 0  # the number of entries of client state that the client keeps

    def __post_init__(self) -> None:
        self.metrics = Reported(self.client, "metric", self.metrics)
        self.records = Reported(self.client, "record", self.records)


def no_net() -> Net:
    """The value of `ServerRound.build_net` where a round was made without an experiment (in tests of single parts)."""
    raise RuntimeError("this ServerRound was made without a network")


@dataclass
class ServerRound:
    """What a server part may see in one round. Only `state`, `arrays` and the records may be changed.

    round: the number of the round, from 1 (0 before the first)
    rounds: the number of rounds of the run
    clients: the names of all clients of the federation, in the order of the domains (N of the papers is `len(clients)`)
    previous: the global tensors from which this round started, by name (theta^(t-1)); read-only
    state: this part's own numbers, a dict that JSON can hold
    drawn: the names of the clients that take part in this round, in the order of the domains
    class_counts: the number of training examples of each class, of every client, as it said in the handshake (empty
    for a client that is not online). Their sum is its number of examples. A client may lack classes
    updates: the accepted replies, in the order of the domains (K of the papers is `len(updates)`). It is empty in
    `hand_out`, and in a `make` before the first round. A reply that another part refuses is not among them
    current: the global tensors from which the next round starts; only in `make` they differ from `previous`
    weights: what `weigh` returned, by client; empty before
    answers: what the unseen domain's client answered to this round's visits so far, as {phase: {record: arrays}}
    banks: all banks of the recipe by name, each as {owner: arrays}
    places: the place of every tensor of the network (see Share.place)
    kinds: the kind of every tensor by the type of its module: weight, batch-norm affine or statistics, counter
    parameters: the names of the shared tensors that are parameters, by the type of their module. A server part that
    moves the model moves these. All other tensors are buffers (running statistics, counters) or a client's own, and
    keep the fused value
    arrays: this part's own tensors, {name: array}. Keep everything of the size of a model
    here. Assign or change in place freely: when a client is refused, all of it is restored
    to the beginning of the round
    classes, feature_dim: the number of classes, and of the features that the head sees (0 where a round was made
    without a network)
    experiment: all settings, such as `experiment.train.lr` of the local steps, or `experiment.data`
    known_weights: the weights of clients with so many examples (`Weights.known`), before anything is measured
    device: the device on which a part that trains puts its network
    build_net: makes a new network of the experiment on `device`, with the initial weights of the run's seed

        >>> server = ServerRound(round=3, rounds=10, clients=["photo", "sketch"], previous={}, seed=1)
        >>> server.rng("draws").random() == server.rng("draws").random()
        True
        >>> server.detail("photo", "weight", "conv1", 0.25)
        >>> server.details
        [{'client': 'photo', 'quantity': 'weight', 'name': 'conv1', 'value': 0.25}]
    """

    round: int
    rounds: int
    clients: list[str]
    previous: Arrays
    state: JsonTable = field(default_factory=dict)
    drawn: list[str] = field(default_factory=list)
    class_counts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    updates: Sequence[Update] = ()
    current: Arrays = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    answers: Mapping[str, Entries] = field(default_factory=dict)
    banks: Mapping[str, Entries] = field(default_factory=dict)
    places: Mapping[str, Place] = field(default_factory=dict)
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()
    arrays: ArrayDict = field(default_factory=dict)
    seed: int = 0
    experiment: Experiment = field(default_factory=Experiment)
    device: torch.device = CPU
    build_net: Callable[[], Net] = no_net
    classes: int = 0
    feature_dim: int = 0
    known_weights: Callable[[Mapping[str, int]], dict[str, float] | None] = lambda examples: None
    details: list[Row] = field(default_factory=list)
    client_columns: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def rng(self, purpose: str) -> np.random.Generator:
        """The NumPy generator of (run's seed, purpose, round): the same at every call, also after a resume."""
        return numpy_rng(self.seed, "server", purpose, self.round)

    def generator(self, purpose: str) -> torch.Generator:
        """The torch generator of (run's seed, purpose, round) on the CPU: the same at every call and after a resume."""
        return torch_generator(self.seed, "server", purpose, self.round)

    def detail(self, client: str, quantity: str, name: str, value: float) -> None:
        """Records a quantity of one client (and one layer, `name`) for details.csv."""
        self.details.append({"client": client, "quantity": quantity, "name": name, "value": float(value)})

    def note(self, text: str) -> None:
        """Adds a line to the run's log and to the notes of this round."""
        self.notes.append(text)
