"""Local steps by the gradient at a worse place nearby: FedSAM and FedLESAM."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from clients.last_move import last_move
from clients.networks import statistics_frozen
from clients.parts import Batch, LocalRound, Step, StepFunction
from clients.step.supervised import SupervisedStep
from fedsim.errors import UserError
from fedsim.experiment import Experiment

SMALL = 1e-7  # added to norms


def of_length(vectors: Sequence[Tensor], rho: float) -> list[Tensor]:
    """rho v / (||v|| + 1e-7), the norm over all tensors together; zeros stay zeros."""
    norm = torch.stack(torch._foreach_norm(vectors)).norm()
    return list(torch._foreach_mul(vectors, rho / (norm + SMALL)))


@contextmanager
def moved(parameters: Sequence[Tensor], changes: Sequence[Tensor]) -> Iterator[None]:
    """The parameters with the changes added inside the block; afterwards exactly what they were."""
    before = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        torch._foreach_add_(parameters, changes)
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(parameters, before)


class Perturbed(Step):
    """What both steps have in common."""

    def check(self, experiment: Experiment) -> None:
        """Moves of the size of rho vanish in half precision."""
        if experiment.train.precision != "fp32":
            raise UserError("sharpness-aware steps need train.precision = 'fp32'")


@dataclass(frozen=True)
class SharpnessAware(Perturbed):
    """e = rho g(w) / (||g(w)|| + 1e-7); the optimizer gets g(w + e) at w.  g: gradient of the local loss with its terms

    FedSAM (Qu et al., ICML 2022), frontier.md 2. Both gradients are of the same batch; the norm is over all trainable
    parameters; w comes back exactly. Running statistics see the first pass alone. Weight decay and what terms do to
    gradients act on the step at w. `rho = 0` gives FedAvg bit for bit.

    rho: length of the perturbation; .1 in the released scripts, .05 here
    variant: `official` lets the second pass move running statistics too, as the released code does
    """

    rho: Annotated[float, Field(ge=0)] = 0.05
    variant: Literal["paper", "official"] = "paper"

    def begin(self, round: LocalRound) -> StepFunction:
        """The step with two gradients; the loss returned, and what terms tally, are those of the first."""
        if self.rho == 0:
            return SupervisedStep().begin(round)
        parameters = list(round.parameters().values())

        def step(batch: Batch) -> Tensor:
            loss = round.loss_of(batch)
            round.backward(loss)
            moving = [parameter for parameter in parameters if parameter.grad is not None]
            ascent, tallied = of_length([parameter.grad for parameter in moving], self.rho), dict(round.sums)
            statistics = statistics_frozen(round.net) if self.variant == "paper" else nullcontext()
            with moved(moving, ascent), statistics:
                round.backward(round.loss_of(batch))
            round.sums = tallied
            round.take_step()
            return loss.detach()

        return step


@dataclass(frozen=True)
class GlobalAscent(Perturbed):
    """e = -rho m / (||m|| + 1e-7), constant over the round; the optimizer gets g(w + e) at w.

    FedLESAM (Fan et al., ICML 2024), frontier.md 2: m is the last move of the global model, so that all clients look
    uphill on the global loss and one gradient is enough. m is the difference of the two global models that this client
    received last (paper); in its first round e = 0. m is over the shared parameters. The released code adds a scalar to
    every tensor by mistake, which is not offered. `rho = 0` gives FedAvg bit for bit.

    rho: length of the perturbation; .1 in the released scripts, .05 here
    """

    rho: Annotated[float, Field(ge=0)] = 0.05
    whole: ClassVar[bool] = True

    def begin(self, round: LocalRound) -> StepFunction:
        """The supervised step, with its forward and backward pass at w + e."""
        move = last_move(round) if self.rho > 0 and round.phase == "train" else None
        if move is None:
            return SupervisedStep().begin(round)
        parameters = list(round.shared_parameters().values())
        ascent = of_length(list(move.values()), -self.rho)

        def step(batch: Batch) -> Tensor:
            with moved(parameters, ascent):
                loss = round.loss_of(batch)
                round.backward(loss)
            round.take_step()
            return loss.detach()

        return step
