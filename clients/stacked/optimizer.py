"""SGD, Adam and AdamW over the stacked parameters of several clients."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from clients.stacked.net import Rows
from fedsim.settings import TrainSettings

BUFFERS = {"sgd": ("momentum_buffer",), "adam": ("exp_avg", "exp_avg_sq"), "adamw": ("exp_avg", "exp_avg_sq")}


class StackedOptimizer:
    """The formulas of torch.optim, row by row: a client that does not take a step keeps its parameters and buffers.

        SGD:    g <- g + d w;   b <- rho b + g;   w <- w - eta b                  (b starts at 0, which is PyTorch's g)
        Adam:   g <- g + d w;   m <- m + (1 - b1)(g - m);   v <- b2 v + (1 - b2) g^2
                w <- w - eta m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)        (t counts a client's own steps)
        AdamW:  w <- w (1 - eta d), then Adam without g <- g + d w

    stacks: parameters [N, ...] by name. rates: learning rate by name. Buffers are those of each client's own optimizer:
    `load` takes them from it, `save` gives them back, so that they can be stored.
    """

    def __init__(
        self, stacks: Mapping[str, Tensor], rates: Mapping[str, float], train: TrainSettings, defaults: Mapping
    ) -> None:
        self.kind, self.momentum, self.decay = train.optimizer, train.momentum, train.weight_decay
        self.defaults = defaults
        self.names = list(stacks)
        self.groups: dict[float, list[str]] = {}
        for name in self.names:
            self.groups.setdefault(rates[name], []).append(name)
        used = () if self.kind == "sgd" and not self.momentum else BUFFERS[self.kind]
        self.buffers = {key: {name: torch.zeros_like(stack) for name, stack in stacks.items()} for key in used}
        first = next(iter(stacks.values()))
        # In double precision, as in torch.optim: 1 - b2^t loses four digits in single precision.
        self.steps = torch.zeros(len(first), dtype=torch.float64, device=first.device)

    def load(self, row: int, state: Mapping[Tensor, Mapping[str, Any]], parameters: Mapping[str, Tensor]) -> None:
        """Start a client's row from its own optimizer's state."""
        count = None
        for name in self.names:
            entry = state.get(parameters[name], {})
            for key, stacks in self.buffers.items():
                if entry.get(key) is not None:
                    stacks[name][row].copy_(entry[key])
            count = entry.get("step", count)
        if count is not None:
            self.steps[row].copy_(count)  # a tensor of the device, for which the host does not wait

    def save(self, row: int, state: dict[Tensor, Any], parameters: Mapping[str, Tensor]) -> None:
        """Put a row's buffers into the client's own optimizer's state."""
        for name in self.names:
            entry = {key: stacks[name][row].clone() for key, stacks in self.buffers.items()}
            if self.kind != "sgd":
                entry["step"] = self.steps[row].float()
            if entry:
                state[parameters[name]] = entry

    @torch.no_grad()
    def step(self, rows: Rows, leaves: Mapping[str, Tensor]) -> None:
        """One step of the rows' clients on the gradients of the leaves [R, ...], which are changed in place."""
        count = rows.of(self.steps)
        count += 1
        rows.put(self.steps, count)
        for rate, names in self.groups.items():
            moving = [name for name in names if leaves[name].grad is not None]
            values = [leaves[name] for name in moving]
            gradients = [grad for name in moving if (grad := leaves[name].grad) is not None]
            if not moving:
                continue
            if self.decay and self.kind == "adamw":
                torch._foreach_mul_(values, 1 - rate * self.decay)
            elif self.decay:
                gradients = list(torch._foreach_add(gradients, values, alpha=self.decay))
            taken = {key: [rows.of(stacks[name]) for name in moving] for key, stacks in self.buffers.items()}
            if self.kind == "sgd":
                self._sgd(values, gradients, rate, taken)
            else:
                self._adam(values, gradients, rate, count, **taken)
            for key, buffers in taken.items():
                for name, buffer in zip(moving, buffers):
                    rows.put(self.buffers[key][name], buffer)

    def _sgd(
        self, values: list[Tensor], gradients: list[Tensor], rate: float, buffers: Mapping[str, list[Tensor]]
    ) -> None:
        for momentum in buffers.values():
            torch._foreach_mul_(momentum, self.momentum)
            torch._foreach_add_(momentum, gradients)
            gradients = momentum
        torch._foreach_add_(values, gradients, alpha=-rate)

    def _adam(
        self,
        values: list[Tensor],
        gradients: list[Tensor],
        rate: float,
        count: Tensor,
        exp_avg: list[Tensor],
        exp_avg_sq: list[Tensor],
    ) -> None:
        (beta1, beta2), eps = self.defaults["betas"], self.defaults["eps"]
        torch._foreach_lerp_(exp_avg, gradients, 1 - beta1)
        torch._foreach_mul_(exp_avg_sq, beta2)
        torch._foreach_addcmul_(exp_avg_sq, gradients, gradients, 1 - beta2)
        corrections = rate / (1 - beta1**count), (1 - beta2**count).sqrt()
        first, second = (correction.to(values[0].dtype) for correction in corrections)
        roots = torch._foreach_sqrt(exp_avg_sq)
        for root in roots:
            root.div_(per_row(second, root))
        torch._foreach_add_(roots, eps)
        moves = [per_row(first, mean) * mean for mean in exp_avg]
        torch._foreach_div_(moves, roots)
        torch._foreach_sub_(values, moves)


def per_row(numbers: Tensor, like: Tensor) -> Tensor:
    """Numbers [R] in the shape [R, 1, ...] of a stacked tensor."""
    return numbers.view(-1, *[1] * (like.dim() - 1))


def rates_of(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """Learning rate of every parameter, by name."""
    rate = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    return {name: rate[id(parameter)] for name, parameter in parameters.items()}
