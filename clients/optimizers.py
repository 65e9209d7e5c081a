"""The local optimizer and its learning rate, which depends on the round alone."""

import inspect
import math
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from fedsim.common.errors import UserError
from fedsim.settings import TrainSettings
from fedsim.tensors.arrays import moved

STEP_FROM = 0.8  # FedDG-GA: the rate is multiplied by 0.1 after this share of the rounds

K = TypeVar("K", bound=torch.optim.Optimizer)


def learning_rate(train: TrainSettings, round: int, rounds: int) -> float:
    """The learning rate of round t = 1..T.

    cosine:           m + (lr - m)/2 (1 + cos(pi (t-1)/T)), m = lr_min
    cosine-official:  the same with t/T, because gPerXAN's code steps before training; the last round has rate m
    step:             lr, and 0.1 lr after 80 % of the rounds

    In the first W = warmup_rounds rounds it is lr t/W. The schedule is then that of rounds t - W of T - W.
    """
    warmup = train.warmup_rounds
    if round <= warmup:
        return train.lr * round / warmup
    round, rounds = round - warmup, rounds - warmup
    if train.schedule in ("cosine", "cosine-official"):
        passed = (round - (train.schedule == "cosine")) / rounds
        return train.lr_min + 0.5 * (train.lr - train.lr_min) * (1 + math.cos(math.pi * passed))
    if train.schedule == "step" and round > STEP_FROM * rounds:
        return 0.1 * train.lr
    return train.lr


def gradient_count(steps: int, momentum: float, pull: float = 0.0) -> float:
    """a: the number of gradients, each times the learning rate, by which so many SGD steps move the parameters.

        SGD:                              a = tau
        momentum rho with a fresh buffer: a = [tau - rho (1 - rho^tau) / (1 - rho)] / (1 - rho)
        pull mu towards the start:        a <- (1 - eta mu) a + 1 per step, `pull` = eta mu
        both:                             b <- rho b + 1 - eta mu a, a <- a + b (the buffer of the pulled gradients)

    The last line is exact for a constant gradient, and has the two lines above it as special cases.

    Source: FedNova (Wang et al., NeurIPS 2020).
    """
    if pull == 0 and momentum == 0:
        return float(steps)
    if pull == 0:
        return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    buffer = count = 0.0
    for _ in range(steps):
        buffer = momentum * buffer + 1 - pull * count
        count += buffer
    return count


def require_fresh_sgd(part: str, train: TrainSettings) -> None:
    """Raises UserError where the local optimizer is not SGD, or keeps its momentum between rounds. The part computes
    the sum of the gradients from the move of the parameters."""
    if train.optimizer != "sgd":
        raise UserError(f"{part} needs train.optimizer = 'sgd', not {train.optimizer!r}")
    if train.momentum and train.persist_optimizer:
        raise UserError(f"{part} needs a fresh momentum each round; set train.persist_optimizer = false")


def make_optimizer(net: nn.Module, train: TrainSettings, lr: float) -> torch.optim.Optimizer:
    """SGD, Adam or AdamW over the trainable parameters, with one fused kernel per step.

    A module may ask for a multiple of the learning rate for its own parameters by `lr_scales = {"rho": 10.0}`.
    """
    groups: dict[float, list[nn.Parameter]] = {}
    seen: set[int] = set()  # a parameter that several modules share is stepped once, at the rate of the first
    for module in net.modules():
        scales = getattr(module, "lr_scales", {})
        for name, parameter in module._parameters.items():  # `named_parameters` takes longer
            if parameter is not None and parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                groups.setdefault(scales.get(name, 1.0), []).append(parameter)
    parameters = [{"params": members, "lr": lr * scale} for scale, members in groups.items()]
    if train.optimizer == "sgd":
        sgd = eager(torch.optim.SGD)
        return sgd(parameters, lr, momentum=train.momentum, weight_decay=train.weight_decay, fused=True)
    kind = eager(torch.optim.Adam if train.optimizer == "adam" else torch.optim.AdamW)
    return kind(parameters, lr, weight_decay=train.weight_decay, fused=True)


def zero_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Adds momentum buffers of 0 where there are none yet. SGD's first step then gives the same numbers.

    PyTorch's fused SGD cannot step where some parameters have a buffer and others have none, which happens when a
    parameter had no gradient in its first step.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("momentum") else []:
            if optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


@cache
def eager(kind: type[K]) -> type[K]:
    """The same optimizer without what PyTorch's compiler, profiler and hooks put around its methods.

    The decorators for the compiler import it, which takes 1.2 s in every client process of a deployed round. Those for
    profiler and hooks take as long as the step of a small network. Nothing here is compiled or hooked.
    """
    names = ("add_param_group", "state_dict", "load_state_dict")
    plain = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    step: Any = torch.no_grad()(inspect.unwrap(kind.step))
    step.hooked = True  # PyTorch then puts nothing around it
    return cast(type[K], type(kind.__name__, (kind,), {**plain, "step": step, "zero_grad": drop_gradients}))


def drop_gradients(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
    """Sets the gradients of all parameters of an optimizer to None."""
    assert set_to_none
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def optimizer_tensors(optimizer: torch.optim.Optimizer, net: nn.Module) -> dict[str, Tensor]:
    """Momentum and moment buffers by the name `parameter number.buffer`, for the client's store.

    Only the buffers of the network's own parameters: those that a step adds for the round (projections) are made anew.
    """
    trained = sum(parameter.requires_grad for parameter in net.parameters())
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": value
        for index, entry in state.items()
        if index < trained
        for name, value in entry.items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Gives the buffers of an earlier round back to the optimizer; the learning rate remains that of this round.

    A buffer gets the memory layout of its parameter, because the fused kernels read both as they lie in memory. Of a
    channels-last weight and a buffer in another layout they would combine elements that do not belong together.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    buffers = {key: value for key, value in tensors.items() if value.shape == parameters[int(key.split(".")[0])].shape}
    for key, value in {**tensors, **moved(buffers, parameters[0].device)}.items():
        index, name = key.split(".", 1)
        like = parameters[int(index)]
        fits = value.shape == like.shape
        laid_out = torch.empty_like(like, dtype=value.dtype).copy_(value) if fits else value.clone()
        state.setdefault(int(index), {})[name] = laid_out.detach()
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
