"""FPL's client term: features are contrasted with prototypes of all classes and drawn to their own class's mean."""

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


def cpcl(features: Tensor, labels: Tensor, protos: Tensor, classes: Tensor, tau: float) -> Tensor:
    """Per sample [B]: -log( sum_{p in P^y} e^{cos(f,p)/tau} / sum_{q in P} e^{cos(f,q)/tau} ); 0 where P^y is empty.

    features [B, d], labels [B], protos [N, d], and the classes [N] of the prototypes. Gradients reach the features
    alone.
    """
    similarity = F.normalize(features, dim=1) @ F.normalize(protos, dim=1).T / tau
    same_class = labels[:, None] == classes[None]
    # A sample without prototypes of its class gets the loss 0.
    same_class = same_class | ~same_class.any(dim=1, keepdim=True)
    return similarity.logsumexp(dim=1) - similarity.masked_fill(~same_class, -torch.inf).logsumexp(dim=1)


def upcr(features: Tensor, labels: Tensor, unbiased: Tensor, known: Tensor, reduction: str = "mean") -> Tensor:
    """Per sample [B]: ||f - U^y||^2 over the d dimensions ("sum"), or that divided by d ("mean"); 0 where y has no U.

    unbiased [C, d] holds the U, and known [C] (bool) says which classes have one.
    """
    squares = (features - unbiased[labels]).square()
    return known[labels] * (squares.sum(dim=1) if reduction == "sum" else squares.mean(dim=1))


@dataclass(frozen=True)
class PrototypeContrast(Term):
    """(1/B) sum_i (CPCL_i + UPCR_i) over the samples of classes that have prototypes:

        CPCL = -log( sum_{p in P^y} e^{cos(f,p)/tau} / sum_{q in P} e^{cos(f,q)/tau} ),   UPCR = (1/d) ||f - U^y||^2

    Source: FPL (Huang et al., CVPR 2023). f are the features that the head sees, P^c the cluster prototypes of class c
    from the bank `prototypes`, and U^c their plain mean; P and U are constants. Each client sends the mean feature of
    each class. B is the size of the whole batch. Without prototypes, as in round 1, the loss equals FedAvg's bit for
    bit. The paper sums UPCR over the dimensions; the released code takes their mean, which is d times smaller. The
    paper prints tau in a denominator inside the similarity, which can be read in two ways; here it is cos / tau, as in
    the released code.

    tau: the temperature. The released code has 0.02, the authors' later MarsFL 0.2
    upcr: "mean" (released code) or "sum" (paper)
    proto_source: "last_epoch" sends the means of the features that the last local epoch trained on (released code);
    "final_pass" those of one more pass over the images without augmentation, by the trained model in eval mode. The
    last epoch has as many steps as one epoch of FedAvg, also where another part makes an epoch longer (CCST's copies).
    Of a step that passes a batch twice (FedSAM), the first pass counts
    min_per_proto: for a class with fewer training images nothing is sent; with 5, no single image can be read from a
    prototype
    """

    side_by_side: ClassVar[bool] = True
    assumes = (Fact.HARD_LABELS,)

    tau: Annotated[float, Field(gt=0), Tuned("log:0.02:0.2", "the released code and MarsFL")] = 0.02
    upcr: Literal["mean", "sum"] = "mean"
    proto_source: Literal["last_epoch", "final_pass"] = "last_epoch"
    min_per_proto: Annotated[int, Field(ge=1)] = 1
    bank: ClassVar[str] = "prototypes"
    requires: ClassVar[dict[str, str]] = {"banks": "prototypes"}
    columns: ClassVar[tuple[str, ...]] = ("cpcl_loss", "upcr_loss")

    @property
    def discloses(self) -> str:
        """What a mean shows depends on the number of images in it."""
        return means_disclosed(self.min_per_proto, "means over clusters of clients")

    def begin(self, round: LocalRound) -> StepFunction:
        """The two losses. The features of the last epoch are summed while it runs."""
        means = round.scratch[self.bank] = PrototypesOfRound(round, self.proto_source == "final_pass")
        return means.watching(self, self._contrast(round))

    def end(self, round: LocalRound) -> None:
        """Sends the mean feature of each class."""
        round.send(self.bank, round.scratch[self.bank].prototypes(self.min_per_proto))

    def _contrast(self, round: LocalRound) -> StepFunction:
        record = round.tensors(self.bank, "prototype_contrast")
        if not record:
            return lambda batch: torch.zeros((), device=round.device)
        protos, classes = record["cluster_protos"], record["classes"]
        member = F.one_hot(classes, round.classes).float()
        number = member.sum(dim=0)
        unbiased = member.T @ protos / number.clamp_min(1)[:, None]

        def term(batch: Batch) -> Tensor:
            features = batch.features.float()
            contrast = cpcl(features, batch.labels, protos, classes, self.tau).mean()
            consistency = upcr(features, batch.labels, unbiased, number > 0, self.upcr).mean()
            round.tally("cpcl_loss", contrast)
            round.tally("upcr_loss", consistency)
            return contrast + consistency

        return term
