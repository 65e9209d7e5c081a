"""What a client asks of a recipe."""

from typing import Protocol

from clients.parts import (
    Augment,
    Batches,
    ClientPart,
    Companion,
    LocalUpdate,
    Objective,
    Report,
    Step,
    Term,
    Unlabelled,
)
from fedsim.models.inserts.base import Insert
from fedsim.models.norms.base import Norm
from strategies.recipe import ServerRecipe


class ClientRecipe(ServerRecipe, Protocol):
    """What a client asks of a recipe."""

    @property
    def objective(self) -> Objective:
        """The loss of a batch."""

    @property
    def update(self) -> LocalUpdate:
        """How a loss moves the weights."""

    @property
    def companions(self) -> tuple[Companion, ...]:
        """What else learns beside the model."""

    @property
    def client(self) -> Step:
        """How one local step is taken."""

    @property
    def terms(self) -> tuple[Term, ...]:
        """What is added to the loss."""

    @property
    def batches(self) -> Batches:
        """The examples of the round's batches."""

    @property
    def augment(self) -> Augment | None:
        """What changes a batch before the step."""

    @property
    def reports(self) -> tuple[Report, ...]:
        """What is measured around the training."""

    @property
    def unlabelled(self) -> Unlabelled | None:
        """What the unseen domain's client does."""

    @property
    def inserts(self) -> tuple[Insert, ...]:
        """The modules that are added to the network."""

    @property
    def norm(self) -> Norm:
        """The network's normalization."""

    @property
    def pooled(self) -> bool:
        """Whether one client holds the data of all."""

    def client_parts(self) -> list[ClientPart]:
        """The parts that act on a client."""

    def contributor(self, bank: str) -> ClientPart:
        """The part that contributes to a bank."""
