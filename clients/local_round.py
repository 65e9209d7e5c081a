"""What a client part sees of its local round: network, data, steps, and the records from and to the server."""

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from clients.batch import LATE, Batch
from clients.compiled import Compiled
from clients.local_data import LocalData
from clients.store import ClientStore
from fedsim.common.errors import UserError
from fedsim.common.seeding import numpy_rng, torch_generator
from fedsim.models.net import Net
from fedsim.models.tasks import CLASSIFIES, TaskRules
from fedsim.settings import TrainSettings
from fedsim.tensors.arrays import to_arrays

Drawn = TypeVar("Drawn")
StepFunction = Callable[[Batch], Tensor]
LossFunction = Callable[[], Tensor]
UpdateFunction = Callable[[LossFunction], Tensor]
Hook = Callable[[], None]


@dataclass
class LocalRound:
    """The local work of one client in one round: everything that its parts may see.

    client, clients: the name of this client, and the names of all source clients in the order of the domains
    net: the network with the received tensors, and with this client's own where the share rule keeps some
    train: the settings `[train]` of the experiment
    classes: the number of classes
    seed: the seed of the run
    places: the place of every tensor of the network (`shared`, `upload`, `local`, `frozen`; see
    `strategies.parts.Share`)
    round, rounds: the number of this round (0 before the first one), and the number of rounds
    phase: "train", or the prelude of a step
    steps, images: the numbers of steps and of training images of this round, which are known when the parts begin
    best_step: the step after which the model that is sent was reached, which is known when the parts end; 0: the last
    store: keeps what this client needs in later rounds
    data: its examples (`clients.local_data.LocalData`)
    optimizer, lr: the optimizer of the network's trainable parameters, made anew for the round, and its learning rate
    records: the records that the server sent with the model, by name
    objective, update, terms: the functions of the recipe's objective (None: `forward`), update (None: one gradient) and
    terms
    scratch: values that live exactly as long as the round
    before_step: functions that change the gradients between the backward pass and the optimizer's step, in this order
    after_step: functions that act on the batch after the step: companions, and second optimizers of other parts
    outbox: records that go to the server with the trained model; see `send`
    task: the loss and the metrics of the data set's task
    warm: see `remembered`
    pull: the sum of the terms' `pull`; a term that multiplies gradients multiplies it too when it begins
    asked: the bank to which the server asks for a contribution
    delivered: the clients whose updates came, for a bank `after` training
    known_weights: the weights of clients with so many examples, where they depend on nothing else
    build_net: makes the run's initial network anew, on the CPU
    """

    client: str
    net: Net
    train: TrainSettings
    classes: int
    round: int
    rounds: int
    phase: str
    seed: int
    device: torch.device
    store: ClientStore
    data: LocalData
    clients: tuple[str, ...] = ()
    places: Mapping[str, str] = field(default_factory=dict)
    steps: int = 0
    images: float = 0
    best_step: int = 0
    optimizer: torch.optim.Optimizer = LATE
    lr: float = 0.0
    records: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
    objective: StepFunction | None = None
    update: UpdateFunction | None = None
    terms: list[StepFunction] = field(default_factory=list)
    scratch: dict[str, Any] = field(default_factory=dict)
    before_step: list[Hook] = field(default_factory=list)
    after_step: list[Callable[[Batch], object]] = field(default_factory=list)
    outbox: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    warm: dict[str, tuple[Hashable, Any]] = field(default_factory=dict)
    task: TaskRules = CLASSIFIES
    pull: float = 0.0
    asked: str = ""
    delivered: tuple[str, ...] = ()
    known_weights: Callable[[Mapping[str, int]], dict[str, float] | None] = lambda examples: None
    build_net: Callable[[], Net] = LATE
    compiled: Compiled | None = None  # with `train.compile`
    sums: dict[str, Tensor | float] = field(default_factory=dict)

    def for_phase(self, phase: str) -> "LocalRound":
        """The same round for another phase, without the scratch, the parts' functions and the tallies of the first."""
        return replace(self, phase=phase, steps=0, images=0, best_step=0, objective=None, update=None, terms=[],
                       scratch={}, before_step=[], after_step=[], sums={})  # fmt: skip

    @property
    def index(self) -> int:
        """The number of this client in the order of the domains, from 0; equal in every round and at every site."""
        return self.clients.index(self.client)

    @property
    def epochs(self) -> float:
        """How often this client trains on its own images in this round, also where the experiment plans iterations."""
        return self.images / max(self.data.examples, 1) if self.train.iterations else float(self.train.epochs)

    @property
    def sent_steps(self) -> int:
        """The number of steps that the model which is sent has taken: `steps`, or fewer with `train.local_checks`."""
        return self.best_step or self.steps

    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters of the network by name, in the network's order."""
        return {name: parameter for name, parameter in self.net.named_parameters() if parameter.requires_grad}

    def shared_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that all clients share, by name: those with the place `shared`."""
        return {name: p for name, p in self.net.named_parameters() if self.places.get(name, "shared") == "shared"}

    def state_of(self, net: nn.Module | None = None) -> dict[str, Tensor]:
        """All tensors of the network (or of a copy of it) except the frozen ones, which are equal everywhere.

        A part that stores a model stores these.
        """
        state = (net or self.net).state_dict()
        return {name: value for name, value in state.items() if self.places.get(name) != "frozen"}

    # --- one step -----------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, net: Net | None = None) -> Tensor:
        """The task's loss of the batch with the network (or another): cross-entropy, or the soft Dice loss of masks.

        Fills batch.features, batch.logits and batch.loss.
        """
        net = net or self.net
        with self.autocast():
            if self.compiled is not None and self.compiled.fits(net, batch.images):
                batch.features, batch.logits = self.compiled(batch.images)
            else:
                batch.features = net.features(batch.images)
                batch.logits = net.head(batch.features)
        batch.loss = self.task.loss(batch.logits, batch.truth)
        return batch.loss

    def with_terms(self, batch: Batch, loss: Tensor) -> Tensor:
        """The loss plus the terms of the recipe, which use the values that `forward` has written into the batch."""
        for term in self.terms:
            loss = loss + term(batch)
        return loss

    def loss_of(self, batch: Batch) -> Tensor:
        """The local loss of the batch at the present weights: the recipe's objective with its terms.

        The objective may change the batch (views, mixtures); a step that needs it as it was keeps a copy.
        """
        return self.with_terms(batch, (self.objective or self.forward)(batch))

    def backward(self, loss: Tensor, keep_graph: bool = False) -> None:
        """Computes the gradients of the loss, which replace earlier ones. Call `take_step` after it.

        `keep_graph` must be true when another loss will be computed from values that this one was computed from.
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward(retain_graph=keep_graph)

    def take_step(self) -> None:
        """Calls the functions in `before_step`, then takes the optimizer's step on the resulting gradients.

        With `train.clip_norm` they are first scaled down to this norm, if theirs is larger.
        """
        for hook in self.before_step:
            hook()
        if self.train.clip_norm:
            nn.utils.clip_grad_norm_(self.parameters().values(), self.train.clip_norm)
        self.optimizer.step()

    def apply_gradients(self, loss: Tensor) -> Tensor:
        """One whole step on the loss, by its gradient: `backward`, then `take_step`. Returns the loss without graph."""
        self.backward(loss)
        self.take_step()
        return loss.detach()

    def move(self, loss: LossFunction) -> Tensor:
        """One step of the recipe's update, which asks for the loss as often as it needs; the loss without its graph."""
        return self.update(loss) if self.update else self.apply_gradients(loss())

    def autocast(self) -> AbstractContextManager:
        """bf16 autocast when `train.precision` asks for it; otherwise a context that does nothing."""
        return autocast_of(self.train, self.device)

    # --- randomness ---------------------------------------------------------------------------------------------

    def rng(self, purpose: str) -> np.random.Generator:
        """The NumPy generator of (seed, purpose, client, phase, round)."""
        return numpy_rng(self.seed, purpose, self.client, self.phase, self.round)

    def generator(self, purpose: str) -> torch.Generator:
        """The torch generator of (seed, purpose, client, phase, round), on the CPU."""
        return torch_generator(self.seed, purpose, self.client, self.phase, self.round)

    # --- what comes in and goes out -----------------------------------------------------------------------------

    def record(self, name: str, wanted_by: str) -> Mapping[str, np.ndarray]:
        """A record that the server sent, by name. Raises UserError with the name of the bank when it is missing."""
        if name not in self.records:
            raise UserError(f"{wanted_by} needs the record {name!r} from the server; add its bank to the recipe")
        return self.records[name]

    def tensors(self, name: str, wanted_by: str) -> dict[str, Tensor]:
        """The same record as new tensors on the client's device."""
        tensors = self.record(name, wanted_by)
        return {key: torch.tensor(array, device=self.device) for key, array in tensors.items()}

    def send(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Puts a record into the outbox. It goes to the server's bank of that name with the trained model."""
        self.outbox[name] = {key: array.copy() for key, array in to_arrays(tensors).items()}

    def tally(self, name: str, value: Tensor | float) -> None:
        """Adds to a quantity that the client reports under that name: its sum over the round, divided by the steps.

        Values stay on the device until the round ends.
        """
        self.sums[name] = self.sums.get(name, 0.0) + (value.detach() if isinstance(value, Tensor) else value)

    def tallied(self) -> dict[str, float]:
        """The tallied quantities as numbers."""
        return {name: float(value) / max(self.steps, 1) for name, value in self.sums.items()}

    def remembered(self, name: str, key: Hashable, make: Callable[[], Drawn]) -> Drawn:
        """`make()`, computed once for a key and kept while this process serves the client, for the last key alone.

        Use it only for values that `make` would compute again exactly: another process, or the same one after a
        restart, does compute them again.
        """
        if name not in self.warm or self.warm[name][0] != key:
            self.warm[name] = (key, make())
        return self.warm[name][1]


def autocast_of(train: TrainSettings, device: torch.device) -> AbstractContextManager:
    """bf16 autocast when `train.precision` asks for it; otherwise a context that does nothing."""
    if train.precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()
