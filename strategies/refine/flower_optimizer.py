"""Flower's server optimizers: the averaged update is a gradient, and the server takes a step with a memory.

With Delta_t = fused_t - theta_(t-1) for the shared parameters. Everything else (running statistics, counters, tensors
that clients keep) takes its fused value, because moments of a variance or of a counter mean nothing. The arithmetic is
that of Flower's classes (flwr.serverapp.strategy), in each tensor's own type; m and v are kept in the checkpoint.

Batch norm: the running statistics are those of the clients' models, not of the parameters that the server moved. The
further it moves them from the clients' mean, the worse the statistics fit, and the model's validation shows it. The
papers use networks without batch norm; with it, take a small step (FedAvgM: lr = 1 - momentum) or re-estimate the
statistics on the unseen domain (`method.infer="recompute"`).
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from strategies.parts import Arrays, Refine, ServerRound
from strategies.wire import flower_strategies as flower

Positive = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class FlowerOptimizer(Refine):
    """A step of one of Flower's strategies from the round's first model towards the fused one."""

    def strategy(self) -> flower.FedAvgM | flower.FedOpt:
        """Flower's strategy with this part's settings, without a memory."""
        raise NotImplementedError

    def refine(self, fused: Arrays, server: ServerRound) -> dict[str, np.ndarray]:
        """The step on the shared parameters; the memory goes back to `server.arrays`."""
        names = sorted(server.parameters & fused.keys())
        start, target = {name: server.previous[name] for name in names}, {name: fused[name] for name in names}
        moved, memory = flower.optimizer_step(self.strategy(), server.round, start, target, server.arrays)
        server.arrays.update(memory)
        return {**fused, **{name: np.asarray(moved[name], dtype=fused[name].dtype) for name in names}}


@dataclass(frozen=True)
class FedAvgM(FlowerOptimizer):
    """m_t = momentum m_(t-1) - Delta_t ;  theta_t = theta_(t-1) - lr m_t        (m_1 = -Delta_1)

    Hsu et al. 2019 (arXiv 1909.06335), SGD with momentum as in PyTorch, no Nesterov. `lr=1, momentum=0` gives FedAvg.

    lr: learning rate of the server. momentum: decay of the averaged updates, in [0, 1); the paper tries .7 to .997.
    """

    lr: Positive = 1.0
    momentum: Decay = 0.9

    def strategy(self) -> flower.FedAvgM:
        """Flower's FedAvgM."""
        return flower.FedAvgM(server_learning_rate=self.lr, server_momentum=self.momentum)


@dataclass(frozen=True)
class FedAdam(FlowerOptimizer):
    """theta <- theta + eta sqrt(1 - beta_2^(t+1)) / (1 - beta_1^(t+1)) m / (sqrt(v) + tau)

    m <- beta_1 m + (1 - beta_1) Delta ;  v <- beta_2 v + (1 - beta_2) Delta^2 ;  both start at 0.
    Reddi et al., ICLR 2021 (FedAdam). The paper has no bias correction and starts v at tau^2 or more; this is Flower's
    form, whose exponent is t + 1 in round t = 1, 2, ... `beta_1 = beta_2 = 0` with eta = tau, both large, comes as near
    to FedAvg as one likes.

    eta: learning rate of the server; the paper tunes it for every task. beta_1, beta_2: decay of the moments. tau: the
    adaptivity; coordinates whose updates are much smaller than tau move less.
    """

    eta: Positive = 0.1
    beta_1: Decay = 0.9
    beta_2: Decay = 0.99
    tau: Positive = 1e-3

    def strategy(self) -> flower.FedAdam:
        """Flower's FedAdam."""
        return flower.FedAdam(eta=self.eta, beta_1=self.beta_1, beta_2=self.beta_2, tau=self.tau)


@dataclass(frozen=True)
class FedYogi(FlowerOptimizer):
    """theta <- theta + eta m / (sqrt(v) + tau)

    m <- beta_1 m + (1 - beta_1) Delta ;  v <- v - (1 - beta_2) Delta^2 sign(v - Delta^2) ;  both start at 0.
    Reddi et al., ICLR 2021 (FedYogi), who start v at tau^2 or more. Fields as FedAdam's. `beta_1 = beta_2 = 0` with
    eta = tau, both large, comes as near to FedAvg as one likes.
    """

    eta: Positive = 0.01
    beta_1: Decay = 0.9
    beta_2: Decay = 0.99
    tau: Positive = 1e-3

    def strategy(self) -> flower.FedYogi:
        """Flower's FedYogi."""
        return flower.FedYogi(eta=self.eta, beta_1=self.beta_1, beta_2=self.beta_2, tau=self.tau)


@dataclass(frozen=True)
class FedAdagrad(FlowerOptimizer):
    """v <- v + Delta^2 ;  theta <- theta + eta Delta / (sqrt(v) + tau) ;  v starts at 0.

    Reddi et al., ICLR 2021 (FedAdagrad with beta_1 = 0), who start v at tau^2 or more. eta = tau, both large, comes as
    near to FedAvg as one likes.

    eta: learning rate of the server. tau: the adaptivity.
    """

    eta: Positive = 0.1
    tau: Positive = 1e-3

    def strategy(self) -> flower.FedAdagrad:
        """Flower's FedAdagrad."""
        return flower.FedAdagrad(eta=self.eta, tau=self.tau)
