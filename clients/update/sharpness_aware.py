"""Updates by the gradient at a nearby point of higher loss: FedSAM, FedASAM and FedLESAM."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from clients.parts import LocalRound, LocalUpdate, LossFunction, UpdateFunction
from clients.tools.last_move import last_move
from clients.tools.networks import statistics_frozen
from clients.update.one_gradient import OneGradient
from fedsim.common.errors import UserError
from fedsim.settings.effect import Above, Only
from fedsim.settings.experiment import Experiment
from fedsim.settings.tuned import Tuned

SMALL = 1e-7  # added to norms


def of_length(vectors: Sequence[Tensor], rho: float) -> list[Tensor]:
    """rho v / (||v|| + 1e-7), where the norm is over all tensors together; zeros stay zeros."""
    norm = torch.stack(torch._foreach_norm(list(vectors))).norm()
    return list(torch._foreach_mul(list(vectors), rho / (norm + SMALL)))


@contextmanager
def moved(parameters: Sequence[Tensor], changes: Sequence[Tensor]) -> Iterator[None]:
    """Inside the block the changes are added to the parameters; afterwards these are exactly what they were."""
    before = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        torch._foreach_add_(list(parameters), list(changes))
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(list(parameters), before)


class Perturbed(LocalUpdate):
    """The part that both updates have in common."""

    def check(self, experiment: Experiment) -> None:
        """Changes of the size of rho are lost in half precision, which is therefore refused."""
        if experiment.train.precision != "fp32":
            raise UserError("sharpness-aware steps need train.precision = 'fp32'")


@dataclass(frozen=True)
class SharpnessAware(Perturbed):
    """e = rho g(w) / (||g(w)|| + 1e-7); the optimizer gets g(w + e) at w, g the gradient of the local loss with terms.

    Source: FedSAM (Qu et al., ICML 2022). Both gradients are of the same batch, with the same draws of the objective
    and the terms; layers that draw (dropout, MixStyle) draw anew, as in the released code. The norm is over all
    trainable parameters of the network, a client's own layers among them; afterwards w is exactly what it was. Only the
    first pass updates running statistics. Weight decay, and the changes that terms make to gradients, act on the step
    at w. `rho = 0` gives FedAvg bit for bit.

    rho: the length of the perturbation, 0.1 in the released scripts and 0.05 here
    variant: `official` lets the second pass update running statistics too, as the released code does
    """

    rho: Annotated[float, Field(ge=0), Tuned("0.01,0.05,0.1,0.5", "FedSAM, and SAM in DomainBed")] = 0.05
    variant: Literal["paper", "official"] = "paper"

    def begin(self, round: LocalRound) -> UpdateFunction:
        """The update by two gradients. The returned loss and the tallies are those of the first."""
        if self.rho == 0:
            return OneGradient().begin(round)
        return by_two_gradients(
            round, lambda moving, gradients: of_length(gradients, self.rho), freezes=self.variant == "paper"
        )


@dataclass(frozen=True)
class AdaptiveSharpness(Perturbed):
    """e = rho T^2 g / (||T g|| + 1e-7) with T = |w| + eta for weights and T = 1 for others; then g(w + e) at w.

    Source: FedASAM (Caldarola et al., ECCV 2022), from the released code (debcaldarola/fedsam 64bbf93): weights are the
    parameters with "weight" in their names, and the norm is over all trainable parameters. Both gradients are of the
    same batch, with the same draws, and only the first pass updates running statistics (our choice, as in
    `sharpness_aware`). Weight decay acts on the step at w. `rho = 0` gives FedAvg bit for bit.

    rho: the length of the perturbation, in units of the weights; the released code's own default is 0.5
    eta: is added to the sizes of weights, so that those near 0 move too; the released code's own default is 0.01
    """

    rho: Annotated[float, Field(ge=0), Tuned("0.05,0.1,0.5,0.7", "ours: around the paper's values")] = 0.7
    eta: Annotated[float, Field(ge=0), Only(rho=Above(0))] = 0.2

    def begin(self, round: LocalRound) -> UpdateFunction:
        """The update by two gradients. The returned loss and the tallies are those of the first."""
        if self.rho == 0:
            return OneGradient().begin(round)
        weights = {parameter for name, parameter in round.parameters().items() if "weight" in name}

        def ascent(moving: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
            sizes = [each.detach().abs() + self.eta if each in weights else torch.ones_like(each) for each in moving]
            scaled = of_length([size * gradient for size, gradient in zip(sizes, gradients, strict=True)], self.rho)
            return [size * each for size, each in zip(sizes, scaled, strict=True)]

        return by_two_gradients(round, ascent)


def by_two_gradients(
    round: LocalRound, ascent: Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]], freezes: bool = True
) -> UpdateFunction:
    """The update that steps at w by the gradient at w + ascent(parameters, gradients at w).

    freezes: whether running statistics stay in the second pass
    """
    parameters = list(round.parameters().values())

    def update(loss_of: LossFunction) -> Tensor:
        loss = loss_of()
        round.backward(loss)
        moving = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = [grad for parameter in moving if (grad := parameter.grad) is not None]
        changes, tallied = ascent(moving, gradients), dict(round.sums)
        statistics = statistics_frozen(round.net) if freezes else nullcontext()
        with moved(moving, changes), statistics:
            round.backward(loss_of())
        round.sums = tallied
        round.take_step()
        return loss.detach()

    return update


@dataclass(frozen=True)
class GlobalAscent(Perturbed):
    """e = -rho m / (||m|| + 1e-7), constant over the round; the optimizer gets g(w + e) at w.

    Source: FedLESAM (Fan et al., ICML 2024). m is the last move of the global model, so that all clients go in the
    direction in which the global loss rises, and one gradient per step is enough. m is the difference of the two global
    models that this client received last (the paper); in its first round e = 0. m is over the shared parameters. The
    released code adds a scalar to every tensor by mistake; this is not offered. `rho = 0` gives FedAvg bit for bit.

    rho: the length of the perturbation, 0.1 in the released scripts and 0.05 here
    """

    rho: Annotated[float, Field(ge=0), Tuned("0.01,0.05,0.1,0.5", "FedSAM, and SAM in DomainBed")] = 0.05
    whole: ClassVar[bool] = True

    def begin(self, round: LocalRound) -> UpdateFunction:
        """The update with its forward and backward pass at w + e."""
        move = last_move(round) if self.rho > 0 and round.phase == "train" else None
        if move is None:
            return OneGradient().begin(round)
        parameters = list(round.shared_parameters().values())
        ascent = of_length(list(move.values()), -self.rho)

        def update(loss_of: LossFunction) -> Tensor:
            with moved(parameters, ascent):
                loss = loss_of()
                round.backward(loss)
            round.take_step()
            return loss.detach()

        return update
