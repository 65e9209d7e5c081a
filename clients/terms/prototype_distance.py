"""FedProto's client term: features are drawn to the mean prototype of their class."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from clients.parts import Batch, LocalRound, StepFunction, Term
from clients.tools.class_means import PrototypesOfRound, means_disclosed
from fedsim.parts.facts import Fact
from fedsim.settings.tuned import Tuned


def prototype_distance(features: Tensor, labels: Tensor, protos: Tensor, present: Tensor) -> Tensor:
    """(1 / (B d)) sum_i ||z_i - P^{y_i}||^2, a scalar; an image whose class has no prototype adds 0 to the sum.

    features [B, d], labels [B], protos [C, d], and present [C] (bool): which classes have a prototype.
    """
    squares = (features - protos[labels]).square().mean(dim=1)
    return (present[labels] * squares).mean()


@dataclass(frozen=True)
class PrototypeDistance(Term):
    """lam (1 / (B d)) sum_i ||z_i - P^{y_i}||^2, where P^c is the mean over clients of the prototypes of class c.

    Source: FedProto (Tan et al., AAAI 2022). z [B, d] are the features that the head sees, and P^c a constant from the
    bank `prototypes`, with `cluster = false`. Without prototypes, as in round 1, the loss is FedAvg's bit for bit; an
    image whose class has none adds 0. The square is averaged over the batch and over all d features, as in the released
    code (yuetan031/FedProto 97e42e2). Every client sends the mean feature of each class; means count equally, while
    equation 6 of the paper weighs them by their images. The released code sends means over the last epoch, under the
    weights of all its steps. In the paper no model is ever averaged. This row averages them too, as benchmarks with
    several domains do (MarsFL), because an unseen domain needs one model.

    lam: the weight of the term; 1 in the released code, 0.1 to 1 in the paper
    proto_source: "last_epoch" sends the means of the features that the last local epoch trained on (released code);
    "final_pass" those of one more pass over the images without augmentation, by the trained model in eval mode
    min_per_proto: for a class with fewer training images nothing is sent; with 5, no single image can be read from a
    prototype
    """

    side_by_side: ClassVar[bool] = True
    signed_loss: ClassVar[bool] = False
    assumes = (Fact.HARD_LABELS,)

    lam: Annotated[float, Field(ge=0), Tuned("0.1,0.3,1", "the paper and the released code")] = 1.0
    proto_source: Literal["last_epoch", "final_pass"] = "last_epoch"
    min_per_proto: Annotated[int, Field(ge=1)] = 1
    bank: ClassVar[str] = "prototypes"
    requires: ClassVar[dict[str, str]] = {"banks": "prototypes"}
    columns: ClassVar[tuple[str, ...]] = ("prototype_loss",)

    @property
    def sets(self) -> dict[str, dict[str, object]]:
        """One prototype of each class."""
        return {"prototypes": {"cluster": False}}

    @property
    def discloses(self) -> str:
        """What a mean shows depends on the number of images in it."""
        return means_disclosed(self.min_per_proto, "the mean over clients")

    def begin(self, round: LocalRound) -> StepFunction:
        """The distance. The features of the last epoch are summed while it runs."""
        means = round.scratch[self.bank] = PrototypesOfRound(round, self.proto_source == "final_pass")
        return means.watching(self, self._distance(round))

    def end(self, round: LocalRound) -> None:
        """Sends the mean feature of each class."""
        round.send(self.bank, round.scratch[self.bank].prototypes(self.min_per_proto))

    def _distance(self, round: LocalRound) -> StepFunction:
        record = round.tensors(self.bank, "prototype_distance")
        if not record or self.lam == 0:
            return lambda batch: torch.zeros((), device=round.device)
        member = F.one_hot(record["classes"], round.classes).float()
        number = member.sum(dim=0)
        protos = member.T @ record["cluster_protos"] / number.clamp_min(1)[:, None]

        def term(batch: Batch) -> Tensor:
            loss = prototype_distance(batch.features.float(), batch.labels, protos, number > 0)
            round.tally("prototype_loss", loss)
            return self.lam * loss

        return term
