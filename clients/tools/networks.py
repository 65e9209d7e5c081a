"""Tools for networks: frozen copies, forward passes without side effects, and steps of a second optimizer."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedsim.models.net import Net

M = TypeVar("M", bound=nn.Module)


def twin_of(net: M, state: Mapping[str, Tensor] | None = None) -> M:
    """A copy of the network in the same modes, with its own tensors or with those of `state`.

    Tensors that `state` does not contain (frozen ones, see `LocalRound.state_of`) are copied from the network. Raises
    ValueError for a name that the network lacks.
    """
    twin = copy.deepcopy(net)
    unknown = twin.load_state_dict(state, strict=False).unexpected_keys if state is not None else []
    if unknown:
        raise ValueError(f"the network has no tensor {unknown[0]!r}")
    return twin


def frozen_copy(net: M, state: Mapping[str, Tensor] | None = None) -> M:
    """A copy of the network in eval mode without gradients, with its own tensors or with those of `state`."""
    return twin_of(net, state).requires_grad_(False).eval()


@contextmanager
def statistics_frozen(net: nn.Module) -> Iterator[None]:
    """Inside the block, training passes use batch statistics but do not change running statistics or their counters.

    It is for second passes over a batch, as in sharpness-aware and two-view methods. It switches off PyTorch's
    `track_running_stats` in every layer that is in training mode and has that attribute.
    """
    layers: list[Any] = [
        module for module in net.modules() if module.training and getattr(module, "track_running_stats", False)
    ]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True


@contextmanager
def apart(generator: torch.Generator, device: torch.device) -> Iterator[None]:
    """Inside the block, draws from torch's global generators (dropout, for example) come from a stream of their own.

    The stream is seeded from `generator`. After the block the global generators are as they were. It is for training
    that must not disturb the training of the shared model.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        seed = int(torch.randint(2**62, (), generator=generator))
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        yield


def after_step_functions(net: nn.Module) -> list[Callable[[], None]]:
    """The methods `after_step` of modules, to be called after every optimizer step (BIN clips its gate then)."""
    return [method for module in net.modules() if callable(method := getattr(module, "after_step", None))]


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    """One step of a second optimizer on a loss of its own; returns the loss without its graph.

    Gradients are computed for this optimizer's parameters and for no others, so that the main step finds no gradient
    from this one. They flow through all modules between the loss and these parameters.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def freeze(net: nn.Module, places: Mapping[str, str]) -> list[nn.Module]:
    """Removes the gradients of parameters with the place `frozen`.

    Returns the modules that have only frozen tensors of their own; their running statistics must not change in
    training.
    """
    frozen = []
    for path, module in net.named_modules():
        prefix = f"{path}." if path else ""
        named = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        placed = [(places[prefix + name], tensor) for name, tensor in named if prefix + name in places]
        fixed = [tensor for place, tensor in placed if place == "frozen"]
        for tensor in fixed:
            tensor.requires_grad_(False)
        if placed and len(fixed) == len(placed):
            frozen.append(module)
    return frozen


def start_training(net: nn.Module, frozen: Iterable[nn.Module]) -> None:
    """Training mode for all modules except those with frozen tensors."""
    net.train()
    for module in frozen:
        module.eval()


@dataclass(frozen=True)
class NetView:
    """What clients know of the network that they share; it is collected once, not for each of thousands of clients.

    state: the network's tensors by name, which are always written in place
    frozen: the modules that have only frozen tensors (see `freeze`)
    after_step: the functions that are called after every optimizer step
    learned: the parameters with gradients
    modes: every module, and whether it is in training mode while clients train
    """

    net: Net
    state: dict[str, Tensor]
    frozen: list[nn.Module]
    after_step: list[Callable[[], None]]
    learned: list[nn.Parameter]
    modes: list[tuple[nn.Module, bool]]

    def train(self) -> None:
        """Training mode; setting it takes longer than finding that the last client left it so."""
        if any(module.training is not training for module, training in self.modes):
            start_training(self.net, self.frozen)

    def eval(self) -> None:
        """Evaluation mode, in the same way."""
        if any(module.training for module, _ in self.modes):
            self.net.eval()


def view_of(net: Net, places: Mapping[str, str]) -> NetView:
    """The network for its clients, without gradients of frozen parameters."""
    frozen = freeze(net, places)
    learned = [parameter for parameter in net.parameters() if parameter.requires_grad]
    start_training(net, frozen)
    modes = [(module, module.training) for module in net.modules()]
    return NetView(net, dict(net.state_dict()), frozen, after_step_functions(net), learned, modes)
