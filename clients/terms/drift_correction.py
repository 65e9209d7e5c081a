"""SCAFFOLD's client term: it corrects gradients by control variates."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from clients.optimizers import gradient_count, require_fresh_sgd
from clients.parts import LocalRound, Term
from fedsim.common.tasks import ANY_TASK
from fedsim.parts.facts import Fact
from fedsim.settings.experiment import Experiment

OWN = "control"  # the store's entry for c_k


@dataclass(frozen=True)
class DriftCorrection(Term):
    """Every step takes g + c - c_k in place of the gradient g, over the shared parameters. After the last step:

        c_k+ = c_k - c + (w^t - y) / (a eta),   delta c_k = c_k+ - c_k goes to the bank `control`.

    Source: SCAFFOLD (Karimireddy et al., ICML 2020), Option II. c is the server's variate and c_k this client's, which
    is kept between rounds; both start at 0. What a client kept with a reply that the server refused is dropped at its
    next message, as the reply was (`clients.store`). w^t is the received model, y the model that is sent, and eta the
    parameter's learning rate. a is the number of steps to y, which is fewer than all with `train.local_checks`. With
    momentum, a is `gradient_count`; this is our choice, because the paper has plain SGD. Adaptive optimizers are
    refused. Buffers and a client's own layers are not corrected. The server's learning rate is the part `server_step`,
    and the paper's uniform weights are `method.weights = "uniform"`. Clients with equal data give FedAvg.

    variant: what divides w^t - y. "option_ii" is the formula above. "epochs_only" (FedDG_Benchmark) takes the number of
    local epochs for a. "without_rate" (the code of FedDG-GA) leaves eta out, so that its variates are too small by that
    factor
    strength: the factor of c - c_k in a step. The released FedLESAM-S has 0.1, its paper has 1. 0 gives FedAvg's model
    bit for bit, and the variates are still exchanged
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK
    order: ClassVar[int] = 1
    side_by_side: ClassVar[bool] = True

    variant: Literal["option_ii", "epochs_only", "without_rate"] = "option_ii"
    strength: Annotated[float, Field(ge=0)] = 1.0
    bank: ClassVar[str] = "control"
    assumes = (Fact.WHOLE_MODEL,)
    requires: ClassVar[dict[str, str]] = {"banks": "control_variates"}
    discloses: ClassVar[str] = "each round the mean local gradient (easier to invert than a difference of weights)"

    def check(self, experiment: Experiment) -> None:
        """The formula of c_k+ holds for SGD that starts anew each round. Others are refused."""
        require_fresh_sgd("drift_correction", experiment.train)

    def begin(self, round: LocalRound) -> None:
        """Registers c - c_k, which is added to the gradients before every step. It adds nothing to the loss."""
        parameters = round.shared_parameters()
        server, local = round.tensors(self.bank, "drift_correction"), round.store.get(OWN) or {}
        zero = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        local = {name: local.get(name, value).to(round.device) for name, value in zero.items()}
        correction = {name: server.get(name, value) - local[name] for name, value in zero.items()}
        start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        round.scratch[OWN] = (start, local, correction)

        def correct() -> None:
            pairs = [(p.grad, correction[name]) for name, p in parameters.items() if p.grad is not None]
            gradients, changes = [gradient for gradient, _ in pairs], [change for _, change in pairs]
            torch._foreach_add_(gradients, changes, alpha=self.strength)

        round.before_step.append(correct)

    def end(self, round: LocalRound) -> None:
        """Stores c_k+ and sends delta c_k. Without a step, or with a learning rate of 0, the variate stays as it is."""
        start, local, correction = round.scratch[OWN]
        scales = self._scales(round)
        change: dict[str, Tensor] = {}
        for name, parameter in round.shared_parameters().items():
            scale = scales.get(parameter, 0.0)  # parameters that this optimizer does not train have no divisor
            server = correction[name] + local[name]
            moved = (start[name] - parameter.detach()) / scale if scale else server
            change[name] = moved - server
        round.send(self.bank, change)
        round.store.put(OWN, {name: local[name] + value for name, value in change.items()})

    def _scales(self, round: LocalRound) -> dict[Tensor, float]:
        """The divisor of w^t - y for each parameter."""
        count = gradient_count(round.sent_steps, round.train.momentum)
        if self.variant == "epochs_only":
            count = round.epochs * round.sent_steps / max(round.steps, 1)
        groups = round.optimizer.param_groups
        rate = {parameter: group["lr"] for group in groups for parameter in group["params"]}
        return {parameter: count * (1.0 if self.variant == "without_rate" else lr) for parameter, lr in rate.items()}
