"""Contracts of the client's parts, and what a part sees of its local round.

A part is a frozen dataclass that keeps nothing itself. `begin(round)` is called once before the first step and returns
the function that acts once per step; `end(round)` is called once after the last step. What a part keeps for one round
lies in the variables of `begin`, or in `round.scratch` when `end` needs it too; what it keeps from round to round lies
in `round.store`.

The order of one round: the received tensors are loaded - `Report.before` of each report - the batches are planned -
`begin` of batches, augment, terms and step - the steps - `end` of all parts - `Report.after` of each report.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clients.store import ClientStore
from fedsim.errors import UserError
from fedsim.experiment import TrainSettings
from fedsim.part import Part, part_name
from fedsim.seeding import numpy_rng, torch_generator

if TYPE_CHECKING:
    from fedsim.recipe import Recipe


@dataclass
class Batch:
    """One training batch on its way through the step; `features`, `logits` and `loss` are filled by the forward pass.

    `loss` is the cross-entropy alone, before any term. `raw` are the images in [0, 1] before augmentation, `positions`
    their places in the training split; `prepare` gives other images of that shape (a transformed `raw`) the very
    augmentation and normalisation that `images` got.
    """

    images: Tensor
    labels: Tensor
    raw: Tensor | None = None
    positions: np.ndarray | None = None
    prepare: Callable[[Tensor], Tensor] | None = None
    features: Tensor | None = None
    logits: Tensor | None = None
    loss: Tensor | None = None


StepFunction = Callable[[Batch], Tensor]
Hook = Callable[[], None]


@dataclass
class LocalRound:
    """One client's local work in one round: all that its parts may look at.

    client, clients: this client's name, and the names of all source clients in domain order.
    net: the network with the received tensors, and with this client's own where the share rule keeps some.
    train: the experiment's `[train]` settings. classes: number of classes. seed: the run's seed.
    places: place of every tensor of the network (`shared`, `upload`, `local`, `frozen`; see `strategies.parts.Share`).
    round, rounds: number of this round (0 before the first one) and of all. phase: "train", or a step's prelude.
    steps: number of steps of this round, known when the parts begin.
    store: what this client keeps from round to round. data: its examples (`clients.local_data.LocalData`).
    optimizer, lr: of the network's trainable parameters, made anew for the round.
    records: what the server sent beside the model, by record name. first_visit: this client has never trained before.
    terms: the functions of the recipe's terms. scratch: lives exactly as long as the round.
    before_step: functions that act on the gradients between the backward pass and the optimizer's step, in the order
    in which they were added. outbox: records that go to the server with the trained model; see `send`.
    warm: see `remembered`.
    """

    client: str
    net: nn.Module
    train: TrainSettings
    classes: int
    round: int
    rounds: int
    phase: str
    seed: int
    device: torch.device
    store: ClientStore
    data: Any
    clients: tuple[str, ...] = ()
    places: Mapping[str, str] = field(default_factory=dict)
    steps: int = 0
    optimizer: torch.optim.Optimizer | None = None
    lr: float = 0.0
    records: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
    first_visit: bool = False
    terms: list[StepFunction] = field(default_factory=list)
    scratch: dict[str, Any] = field(default_factory=dict)
    before_step: list[Hook] = field(default_factory=list)
    outbox: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    warm: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    means: set[str] = field(default_factory=set)

    def for_phase(self, phase: str) -> "LocalRound":
        """The same round for another phase: nothing of the first one's scratch, terms, hooks and tallies is in it."""
        return replace(self, phase=phase, steps=0, terms=[], scratch={}, before_step=[], sums={}, means=set())

    @property
    def index(self) -> int:
        """Number of this client in domain order, from 0; the same in every round and at every site."""
        return self.clients.index(self.client)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters of the network by name, in the network's order."""
        return {name: parameter for name, parameter in self.net.named_parameters() if parameter.requires_grad}

    def state_of(self, net: nn.Module | None = None) -> dict[str, Tensor]:
        """All tensors of the network (or of a copy of it) but the frozen ones, which are the same everywhere: what a
        part keeps in the store when it keeps a model."""
        state = (net or self.net).state_dict()
        return {name: value for name, value in state.items() if self.places.get(name) != "frozen"}

    # --- one step -----------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, net: nn.Module | None = None) -> Tensor:
        """Cross-entropy of the batch under the network (or another one); fills batch.features, logits and loss."""
        net = net or self.net
        with self.autocast():
            batch.features = net.features(batch.images)
            batch.logits = net.head(batch.features)
        batch.loss = F.cross_entropy(batch.logits.float(), batch.labels)
        return batch.loss

    def with_terms(self, batch: Batch, loss: Tensor) -> Tensor:
        """The loss with the recipe's terms added; they look at what `forward` left in the batch."""
        for term in self.terms:
            loss = loss + term(batch)
        return loss

    def loss_of(self, batch: Batch) -> Tensor:
        """Local loss of the batch: forward pass, cross-entropy, and the recipe's terms."""
        return self.with_terms(batch, self.forward(batch))

    def backward(self, loss: Tensor) -> None:
        """Gradients of the loss, in place of earlier ones. Follow it with `take_step`."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()

    def take_step(self) -> None:
        """The optimizer's step on the gradients as they stand, after the functions in `before_step` had their say."""
        for hook in self.before_step:
            hook()
        self.optimizer.step()

    def apply_gradients(self, loss: Tensor) -> Tensor:
        """One whole step on the loss: `backward`, then `take_step`; returns the loss without its graph.

        A step with several gradient evaluations (sharpness-aware ones, for example) calls the two by itself.
        """
        self.backward(loss)
        self.take_step()
        return loss.detach()

    def autocast(self) -> AbstractContextManager:
        """bf16 autocast when `train.precision` asks for it, else nothing."""
        if self.train.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    # --- randomness ---------------------------------------------------------------------------------------------

    def rng(self, purpose: str) -> np.random.Generator:
        """NumPy generator of (seed, purpose, client, phase, round)."""
        return numpy_rng(self.seed, purpose, self.client, self.phase, self.round)

    def generator(self, purpose: str) -> torch.Generator:
        """CPU torch generator of (seed, purpose, client, phase, round)."""
        return torch_generator(self.seed, purpose, self.client, self.phase, self.round)

    # --- what comes in and goes out -----------------------------------------------------------------------------

    def record(self, name: str, wanted_by: str) -> Mapping[str, np.ndarray]:
        """A record that the server sent, by name; UserError naming the missing bank otherwise."""
        if name not in self.records:
            raise UserError(f"{wanted_by} needs the record {name!r} from the server; add its bank to the recipe")
        return self.records[name]

    def tensors(self, name: str, wanted_by: str) -> dict[str, Tensor]:
        """The same record as tensors of its own on the client's device."""
        found = self.record(name, wanted_by)
        return {key: torch.tensor(array, device=self.device) for key, array in found.items()}

    def send(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Put a record into the outbox: it goes to the server's bank of that name with the trained model."""
        self.outbox[name] = {key: tensor.detach().cpu().numpy().copy() for key, tensor in tensors.items()}

    def tally(self, name: str, value: Tensor | float, reduce: Literal["mean", "sum"] = "mean") -> None:
        """Add to a quantity that the client reports under that name: its sum over the round, or that divided by the
        number of steps. Values stay on the device until the round ends."""
        self.sums[name] = self.sums.get(name, 0.0) + (value.detach() if isinstance(value, Tensor) else value)
        if reduce == "mean":
            self.means.add(name)

    def tallied(self) -> dict[str, float]:
        """What was tallied, as numbers."""
        steps = max(self.steps, 1)
        return {name: float(value) / (steps if name in self.means else 1) for name, value in self.sums.items()}

    def remembered(self, name: str, key: Any, make: Callable[[], Any]) -> Any:
        """`make()`, computed once for a key and kept while this process serves the client; the last key's value alone.

        Only for what `make` would compute again exactly: another process, or the same one after a restart, does so.
        """
        if name not in self.warm or self.warm[name][0] != key:
            self.warm[name] = (key, make())
        return self.warm[name][1]


class ClientPart(Part):
    """What all parts of a client have in common.

    bank: name of the bank to which this part contributes: by `collect` when the bank is collected once, or by
    `round.send(bank, ...)` in every round. Empty: it contributes nothing.
    personal: store entry in which this part keeps a personal model, as tensors by the network's own names (all of them
    or some; the received model fills the rest). Such a model is validated in every evaluation phase beside the received
    one, recorded in the columns `personal_accuracy` and `personal_loss`, and written to a file at the end of the run
    with `run.keep_personal`. Empty: there is none.
    """

    bank: ClassVar[str] = ""
    personal: ClassVar[str] = ""

    def refuses(self, recipe: "Recipe") -> str:
        """A contribution needs the bank that takes it."""
        if not self.bank or any(bank.name == self.bank for bank in recipe.banks):
            return ""
        return f"{part_name(self)} needs the bank {self.bank!r}; add it to method.banks"

    def collect(self, round: LocalRound) -> dict[str, np.ndarray]:
        """This client's contribution to a bank that is collected once."""
        raise NotImplementedError

    def end(self, round: LocalRound) -> None:
        """After the last step: keep in `round.store` what the next round needs, `round.send` what the server gets."""


class Step(ClientPart):
    """How one local step is taken."""

    prelude: ClassVar[str] = ""  # name of a training phase before round 1, e.g. CSAC's "acquire"
    needs_levels: ClassVar[bool] = False  # uses the feature maps `net.levels`

    def begin(self, round: LocalRound) -> StepFunction:
        """Function that takes one step on a batch and returns its detached loss.

        `lambda batch: round.apply_gradients(round.loss_of(batch))` is the supervised step. A step that computes its
        loss itself adds the recipe's terms by `round.with_terms`.
        """
        raise NotImplementedError

    def work(self, round: LocalRound) -> TrainSettings:
        """Local work of this phase (epochs, iterations, ...); the experiment's by default."""
        return round.train

    def lacks(self, round: LocalRound) -> bool:
        """Whether a late client has to go through the prelude before it can train."""
        return False


class Term(ClientPart):
    """What is added to the local loss, or changes its gradients."""

    def begin(self, round: LocalRound) -> StepFunction | None:
        """Function batch -> scalar added to the loss, or None when there is nothing to add (a weight of 0, or a part
        that only appends a function to `round.before_step`)."""
        raise NotImplementedError


class Batches(ClientPart):
    """Which examples make up the round's batches.

    balanced: every client trains on the same number of examples, whatever it holds (see `clients.budget`).
    """

    balanced: ClassVar[bool] = False

    def indices(self, examples: int, round: LocalRound, train: TrainSettings) -> Iterator[np.ndarray]:
        """Index arrays into the client's training examples, one per step. It is called before all other parts begin:
        `round.steps` is the number of arrays."""
        raise NotImplementedError


class Augment(ClientPart):
    """What happens to a batch of raw images in [0, 1] before the data set's own augmentation."""

    def copies(self, round: LocalRound) -> int:
        """Versions of every example that make up an epoch. Item `copy * n + position` is version `copy` of an example;
        n alone counts in the aggregation."""
        return 1

    def begin(self, round: LocalRound) -> Callable[[Tensor, np.ndarray], Tensor]:
        """Function (images in [0, 1], their items) -> images in [0, 1]."""
        raise NotImplementedError


class Report(ClientPart):
    """What a client measures around its training and reports as metrics."""

    def before(self, round: LocalRound) -> dict[str, float]:
        """Metrics of the received model."""
        return {}

    def after(self, round: LocalRound) -> dict[str, float]:
        """Metrics of the trained model."""
        return {}
