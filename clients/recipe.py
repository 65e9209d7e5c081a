"""The part of a recipe that a client uses."""

from dataclasses import dataclass

from clients.batches.shuffled import Shuffled
from clients.objective.supervised import SupervisedLoss
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
from clients.step.supervised import SupervisedStep
from clients.update.one_gradient import OneGradient
from fedsim.models.inserts.base import Insert
from fedsim.models.norms import BatchNorm
from fedsim.models.norms.base import Norm
from strategies.recipe import ServerRecipe


@dataclass(frozen=True)
class ClientRecipe(ServerRecipe):
    """The slots of the client's parts and of the network; every default is FedAvg's.

    pooled: one client holds the data of all
    """

    objective: Objective = SupervisedLoss()
    update: LocalUpdate = OneGradient()
    companions: tuple[Companion, ...] = ()
    step: Step = SupervisedStep()
    terms: tuple[Term, ...] = ()
    batches: Batches = Shuffled()
    augment: Augment | None = None
    reports: tuple[Report, ...] = ()
    unlabelled: Unlabelled | None = None
    norm: Norm = BatchNorm()
    inserts: tuple[Insert, ...] = ()
    pooled: bool = False

    @property
    def prelude(self) -> str:
        """The training phase before round 1; empty: none."""
        return self.step.prelude

    def client_parts(self) -> list[ClientPart]:
        """The parts that act on a client."""
        return self.of(ClientPart)

    def contributors(self) -> dict[str, ClientPart]:
        """Client parts that contribute to a bank, by the bank's name."""
        return {bank: part for part in self.client_parts() for bank in part.contributes()}

    def contributor(self, bank: str) -> ClientPart:
        """The client part that contributes to a bank."""
        return self.contributors()[bank]
