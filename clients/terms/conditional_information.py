"""A bound on the information that a representation carries about the image beyond its label (FedSR, FedCMI)."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from clients.parts import Batch, LocalRound, StepFunction, Term
from fedsim.models.inserts.representation import gaussian_of
from fedsim.parts.facts import Fact
from fedsim.settings.effect import Only
from fedsim.settings.tuned import Tuned

ENTRY = "class-reference"  # the store's entry for the client's own reference, and the scratch entry for any
MOMENTUM = "class-reference-momentum"  # the store's entry, used with train.persist_optimizer
FIRST_RHO = 1.0  # s = softplus(1) = 1.313262
FIRST_KAPPA = {"free": 1.0, "softplus": math.log(math.e - 1)}  # kappa = 1


def kl_normal(mean: Tensor, std: Tensor, ref_mean: Tensor, ref_std: Tensor) -> Tensor:
    """KL(N(mean, std^2) || N(ref_mean, ref_std^2)) for each element:

    log(ref_std / std) + (std^2 + (mean - ref_mean)^2) / (2 ref_std^2) - 1/2
    """
    return torch.log(ref_std / std) + (std.square() + (mean - ref_mean).square()) / (2 * ref_std.square()) - 0.5


class ClassReference(nn.Module):
    """r(z|y) = N(r_mu_y, softplus(r_rho_y)^2): one Gaussian over d dimensions for each of C classes.

    kappa is a scale of mu and sigma.
    """

    def __init__(self, classes: int, width: int, kappa: str = "none") -> None:
        super().__init__()
        self.r_mu = nn.Parameter(torch.zeros(classes, width))
        self.r_rho = nn.Parameter(torch.full((classes, width), FIRST_RHO))
        self.kind = kappa
        if kappa != "none":
            self.kappa = nn.Parameter(torch.tensor(FIRST_KAPPA[kappa]))

    def cmi(self, mean: Tensor, std: Tensor, labels: Tensor) -> Tensor:
        """(1/B) sum_i sum_j KL(N(kappa mu_ij, kappa^2 sigma_ij^2) || r(z_j|y_i)) of mean and std [B, d]."""
        if self.kind != "none":
            kappa = F.softplus(self.kappa) if self.kind == "softplus" else self.kappa
            mean, std = kappa * mean, kappa * std
        return kl_normal(mean, std, self.r_mu[labels], F.softplus(self.r_rho)[labels]).sum(dim=1).mean()


@dataclass(frozen=True)
class ConditionalInformation(Term):
    """alpha_cmi CMI, where CMI = (1/B) sum_i sum_j KL(N(mu_ij, sigma_ij^2) || r(z_j|y_i)) >= I(x; z | y).

    Source: FedSR (Nguyen et al., NeurIPS 2022), FedCMI. mu and sigma come from the insert `representation`. r has one
    Gaussian per class. It is a parameter that the same step trains, without weight decay, and it starts from mean 0 and
    rho = 1. In each round the server averages the clients' r class by class, weighted by the number of images of the
    class that each client has (bank `class_reference`). For a class that a client lacks, nothing is changed or sent.
    `alpha_cmi = 0` gives FedAvg on the same network.

    The official code never sends r: every client aligns to its own r, with a scale kappa of mu and sigma that the
    paper's argument does not cover. This is `variant = "official"`: r and kappa stay in the client's store, weight
    decay applies to r, `representation_norm.l2r` becomes "norm", and nothing is sent to the bank. The official runs
    also have method.weights = "uniform", train.persist_optimizer = true (the momentum of r is kept with it) and
    train.iterations = 5.

    alpha_cmi: the weight of the term. The official PACS run has 0.001 (the default of its parser is 5e-4), and
    FedDG_Benchmark tries 1e-4, 1e-3 and 1e-2
    variant: "shared" sends r to the server, "official" does not
    kappa: only for the official variant: "free" is the code's (a negative kappa ends in NaN), "softplus" is always
    positive, "none" has no scale
    reference_weights: "examples" as above, or "uniform" over the clients that have the class; with "uniform" no counts
    are sent
    """

    alpha_cmi: Annotated[float, Field(ge=0), Tuned("1e-4,1e-3,1e-2", "FedDG_Benchmark")] = 0.001
    variant: Literal["shared", "official"] = "shared"
    kappa: Annotated[Literal["free", "softplus", "none"], Only(variant="official")] = "free"
    reference_weights: Annotated[Literal["examples", "uniform"], Only(variant="shared")] = "examples"
    requires: ClassVar[dict[str, str]] = {"banks": "class_references"}
    assumes = (Fact.DRAWN_FEATURES, Fact.HARD_LABELS)
    columns: ClassVar[tuple[str, ...]] = ("cmi_loss",)

    @property
    def bank(self) -> str:
        """The record exists only where the reference is shared."""
        return "class_reference" if self.variant == "shared" else ""

    @property
    def sets(self) -> dict[str, dict[str, object]]:
        """The norm of the official variant, and a bank to which nothing is sent."""
        if self.variant != "official":
            return {}
        return {"representation_norm": {"l2r": "norm"}, "class_references": {"shared": False}}

    @property
    def tag(self) -> str:
        """Results show the official variant."""
        return "" if self.variant == "shared" else "official"

    @property
    def discloses(self) -> str:
        """What r shows about a class."""
        if self.variant == "official":
            return ""
        counts = "the number of images" if self.reference_weights == "examples" else "that it has images"
        return (
            "each round, for every class that the client has, a mean and a spread that follow the representations of "
            f"its images (of a class with one image: that image's own representation), and {counts} of that class"
        )

    def begin(self, round: LocalRound) -> StepFunction | None:
        """Adds the reference to the optimizer of the round and returns the term, or None when alpha_cmi is 0."""
        reference = round.scratch[ENTRY] = self._reference(round)
        if self.alpha_cmi == 0:
            return None
        decay = {"weight_decay": 0.0} if self.bank else {}
        round.optimizer.add_param_group({"params": list(reference.parameters()), **decay})
        if not self.bank and round.train.persist_optimizer:
            restore_momentum(round, reference)

        def term(batch: Batch) -> Tensor:
            mean, std = gaussian_of(batch.features, "conditional_information")
            loss = reference.cmi(mean, std, batch.labels)
            round.tally("cmi_loss", loss)
            return self.alpha_cmi * loss

        return term

    def end(self, round: LocalRound) -> None:
        """Sends the rows of the classes that this client has; in the official variant everything is stored instead."""
        reference = round.scratch[ENTRY]
        if not self.bank:
            round.store.put(ENTRY, reference.state_dict())
            if round.train.persist_optimizer:
                keep_momentum(round, reference)
            return
        counts = torch.from_numpy(round.data.class_counts)
        present = counts > 0
        rows = {name: tensor[present.to(tensor.device)] for name, tensor in reference.state_dict().items()}
        sent = counts if self.reference_weights == "examples" else present.to(counts.dtype)
        round.send(self.bank, {**rows, "counts": sent})

    def _reference(self, round: LocalRound) -> ClassReference:
        """The server's reference, or the client's own; a new one in the first round."""
        kappa = "none" if self.bank else self.kappa
        reference = ClassReference(round.classes, round.net.feature_dim, kappa).to(round.device)
        state = round.tensors(self.bank, "conditional_information") if self.bank else round.store.get(ENTRY)
        if state:
            reference.load_state_dict(state)
        return reference


def keep_momentum(round: LocalRound, reference: ClassReference) -> None:
    """Stores the optimizer's buffers of the reference under the names `parameter.buffer`."""
    momenta = {
        f"{name}.{key}": value
        for name, parameter in reference.named_parameters()
        for key, value in round.optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }
    round.store.put(MOMENTUM, momenta)


def restore_momentum(round: LocalRound, reference: ClassReference) -> None:
    """Gives those buffers back to the optimizer."""
    for key, value in (round.store.get(MOMENTUM) or {}).items():
        name, buffer = key.split(".")
        parameter = reference.get_parameter(name)
        round.optimizer.state[parameter][buffer] = value.to(parameter.device, copy=True)
