"""Flower's server optimizers: the averaged update is a gradient, and the server takes an optimizer step with moments.

Delta_t = fused_t - theta_(t-1) for the shared parameters. All other tensors (running statistics, counters, tensors that
clients keep) take their fused value, because moments of a variance or of a counter mean nothing. The arithmetic is that
of Flower's classes (flwr.serverapp.strategy), in each tensor's own type; m and v are kept in the checkpoint.

Batch norm: the running statistics fit the clients' models, and not the parameters after the server's step. The further
the step goes from the clients' mean, the worse the statistics fit, and the validation of the model shows it. The papers
use networks without batch norm. With batch norm, take a small step (FedAvgM: lr = 1 - momentum) or compute the
statistics again on the unseen domain (`method.infer="recompute"`).
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from fedsim.parts.facts import Fact
from fedsim.settings.tuned import Tuned
from strategies.parts import ArrayDict, Arrays, Refine, ServerRound
from strategies.wire import flower_strategies as flower

ServerRate = Annotated[float, Field(gt=0), Tuned("log:0.001:10", "Reddi et al., ICLR 2021")]
Adaptivity = Annotated[float, Field(gt=0), Tuned("log:1e-5:0.1", "Reddi et al., ICLR 2021")]
Decay = Annotated[float, Field(ge=0, lt=1)]


class FlowerOptimizer(Refine):
    """A step of one of Flower's strategies from the first model of the round towards the fused one."""

    assumes = ()
    replaces = (Fact.CLIENTS_MOVE,)

    kind: ClassVar[type[flower.Optimizer]]

    def strategy(self) -> flower.Optimizer:
        """Flower's strategy with the settings of this part, and without moments."""
        return self.kind(**vars(self))

    def refine(self, fused: Arrays, server: ServerRound) -> ArrayDict:
        """The step on the shared parameters; the moments are written back to `server.arrays`."""
        names = sorted(server.parameters & fused.keys())
        start, target = {name: server.previous[name] for name in names}, {name: fused[name] for name in names}
        moved, memory = flower.optimizer_step(self.strategy(), server.round, start, target, server.arrays)
        server.arrays.update(memory)
        return {**fused, **{name: np.asarray(moved[name], dtype=fused[name].dtype) for name in names}}


@dataclass(frozen=True)
class FedAvgM(FlowerOptimizer):
    """m_t = momentum m_(t-1) - Delta_t ; theta_t = theta_(t-1) - lr m_t, with m_1 = -Delta_1.

    Source: Hsu et al. 2019 (arXiv 1909.06335), SGD with momentum as in PyTorch, without Nesterov. `lr = 1, momentum =
    0` gives FedAvg.

    lr: the learning rate of the server
    momentum: the decay of the averaged updates, in [0, 1); the paper tries 0.7 to 0.997
    """

    lr: ServerRate = 1.0
    momentum: Annotated[Decay, Tuned("0,0.7,0.9,0.97,0.99,0.997", "the paper")] = 0.9

    def strategy(self) -> flower.FedAvgM:
        """Flower's FedAvgM."""
        return flower.FedAvgM(server_learning_rate=self.lr, server_momentum=self.momentum)


@dataclass(frozen=True)
class FedAdam(FlowerOptimizer):
    """theta <- theta + eta_t m / (sqrt(v) + tau), eta_t = eta sqrt(1 - beta_2^(t+1)) / (1 - beta_1^(t+1)).

        m <- beta_1 m + (1 - beta_1) Delta ;  v <- beta_2 v + (1 - beta_2) Delta^2 ;  both move first, from 0

    Source: Reddi et al., ICLR 2021 (FedAdam). The paper has no bias correction and starts v at tau^2 or more. This is
    Flower's form, with the exponent t + 1 in round t = 1, 2, ... With `beta_1 = beta_2 = 0` and eta = tau, FedAvg is
    the limit for large eta.

    eta: the learning rate of the server; the paper tunes it for every task
    beta_1, beta_2: the decay of the moments
    tau: the adaptivity; coordinates with updates much smaller than tau move less
    """

    eta: ServerRate = 0.1
    beta_1: Decay = 0.9
    beta_2: Decay = 0.99
    tau: Adaptivity = 1e-3
    kind: ClassVar[type[flower.Optimizer]] = flower.FedAdam


@dataclass(frozen=True)
class FedYogi(FlowerOptimizer):
    """theta <- theta + eta m / (sqrt(v) + tau).

        m <- beta_1 m + (1 - beta_1) Delta ;  v <- v - (1 - beta_2) Delta^2 sign(v - Delta^2) ;  both move first, from 0

    Source: Reddi et al., ICLR 2021 (FedYogi); the paper starts v at tau^2 or more. With `beta_1 = beta_2 = 0` and eta =
    tau, FedAvg is the limit for large eta.

    eta, beta_1, beta_2, tau: as those of FedAdam
    """

    eta: ServerRate = 0.01
    beta_1: Decay = 0.9
    beta_2: Decay = 0.99
    tau: Adaptivity = 1e-3
    kind: ClassVar[type[flower.Optimizer]] = flower.FedYogi


@dataclass(frozen=True)
class FedAdagrad(FlowerOptimizer):
    """v <- v + Delta^2 ; theta <- theta + eta Delta / (sqrt(v) + tau); v starts at 0.

    Source: Reddi et al., ICLR 2021 (FedAdagrad with beta_1 = 0); the paper starts v at tau^2 or more. With eta = tau,
    FedAvg is the limit for large eta.

    eta: the learning rate of the server
    tau: the adaptivity
    """

    eta: ServerRate = 0.1
    tau: Adaptivity = 1e-3
    kind: ClassVar[type[flower.Optimizer]] = flower.FedAdagrad
