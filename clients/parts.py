"""Contracts of the client's parts, and what a part sees of its local round.

A part is a frozen dataclass; `begin(round)` returns the function that acts once per step, so that everything a part
prepares (a frozen copy, a reference) lives exactly as long as the round.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from clients.store import ClientStore
from fedsim.errors import UserError
from fedsim.experiment import TrainSettings
from fedsim.part import Part, part_name
from fedsim.seeding import numpy_rng, torch_generator

if TYPE_CHECKING:
    from fedsim.recipe import Recipe


@dataclass
class LocalRound:
    """One client's local work in one round: all that its parts may look at."""

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
    optimizer: torch.optim.Optimizer | None = None
    lr: float = 0.0
    records: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
    first_visit: bool = False
    cache: dict[str, Any] = field(default_factory=dict)  # stays warm with the client, may vanish at any time
    outbox: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)  # records sent with the trained model
    sums: dict[str, Tensor] = field(default_factory=dict)  # what steps tallied, on the device

    def rng(self, purpose: str) -> np.random.Generator:
        """NumPy generator of (seed, purpose, client, phase, round)."""
        return numpy_rng(self.seed, purpose, self.client, self.phase, self.round)

    def generator(self, purpose: str) -> torch.Generator:
        """CPU torch generator of (seed, purpose, client, phase, round)."""
        return torch_generator(self.seed, purpose, self.client, self.phase, self.round)

    def tally(self, name: str, value: Tensor) -> None:
        """Add one step's value of a quantity; the client reports the mean over its steps under that name."""
        self.sums[name] = self.sums.get(name, 0.0) + value.detach()

    def autocast(self) -> AbstractContextManager:
        """bf16 autocast when `train.precision` asks for it, else nothing."""
        if self.train.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def record(self, name: str, wanted_by: str) -> Mapping[str, np.ndarray]:
        """A record that the server sent, by name; UserError naming the missing bank otherwise."""
        if name not in self.records:
            raise UserError(f"{wanted_by} needs the record {name!r} from the server; add its bank to the recipe")
        return self.records[name]


@dataclass
class Batch:
    """One training batch on its way through the step; `features`, `logits` and `loss` are filled by the forward pass.

    `raw` are the images in [0, 1] before augmentation, `positions` their places in the training split; `prepare` gives
    other images of that shape (a transformed `raw`) the very augmentation and normalisation that `images` got.
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


class Contributor(Part):
    """A client part that contributes to a bank: `collect` before round 1, or `round.outbox[bank]` in every round."""

    bank: ClassVar[str] = ""  # name of the bank's record

    def refuses(self, recipe: "Recipe") -> str:
        """A contribution needs the bank that takes it."""
        if not self.bank or any(bank.name == self.bank for bank in recipe.banks):
            return ""
        return f"{part_name(self)} needs the bank {self.bank!r}; add it to method.banks"

    def collect(self, round: LocalRound) -> dict[str, np.ndarray]:
        """This client's contribution to a bank that is collected once."""
        raise NotImplementedError


class Step(Contributor):
    """How one local step is taken."""

    prelude: ClassVar[str] = ""  # name of a training phase before round 1, e.g. CSAC's "acquire"
    needs_levels: ClassVar[bool] = False  # uses the feature maps `net.levels`

    def begin(self, round: LocalRound, terms: list[StepFunction]) -> StepFunction:
        """Function that takes one step on a batch and returns its detached loss."""
        raise NotImplementedError

    def work(self, round: LocalRound) -> TrainSettings:
        """Local work of this phase (epochs, iterations, ...); the experiment's by default."""
        return round.train

    def lacks(self, round: LocalRound) -> bool:
        """Whether a late client has to go through the prelude before it can train."""
        return False

    def end(self, round: LocalRound) -> None:
        """After the last step of the phase."""


class Term(Contributor):
    """What is added to the local loss."""

    def begin(self, round: LocalRound) -> StepFunction | None:
        """Function batch -> scalar added to the loss, or None when the term is switched off (weight 0)."""
        raise NotImplementedError


class Batches(Part):
    """Which examples make up the round's batches."""

    def indices(self, examples: int, round: LocalRound, train: TrainSettings) -> Iterator[np.ndarray]:
        """Index arrays into the client's training examples, one per step."""
        raise NotImplementedError


class Augment(Contributor):
    """What happens to a batch of raw images in [0, 1] before the data set's own augmentation."""

    def copies(self, round: LocalRound) -> int:
        """Versions of every example that make up an epoch. Item `copy * n + position` is version `copy` of an example;
        n alone counts in the aggregation."""
        return 1

    def begin(self, round: LocalRound) -> Callable[[Tensor, np.ndarray], Tensor]:
        """Function (images in [0, 1], their items) -> images in [0, 1]."""
        raise NotImplementedError


class Report(Part):
    """What a client measures around its training and reports as metrics."""

    def before(self, round: LocalRound) -> dict[str, float]:
        """Metrics of the received model."""
        return {}

    def after(self, round: LocalRound) -> dict[str, float]:
        """Metrics of the trained model."""
        return {}
