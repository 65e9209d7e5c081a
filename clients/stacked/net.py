"""The networks of several clients as one: every tensor has the clients as its first dimension."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from clients.compiled import FeaturesAndLogits
from clients.tools.networks import freeze, start_training
from fedsim.models.net import Net
from fedsim.models.norms.moments import plain_moments
from fedsim.models.tasks import TaskRules

Autocast = Callable[[], AbstractContextManager]
PREFIX = "net."  # of the network's own names inside the program


class Rows:
    """Some of the clients of a stack, in ascending order."""

    def __init__(self, chosen: Sequence[int], device: torch.device) -> None:
        self.chosen = tuple(chosen)
        self.whole = self.chosen[-1] - self.chosen[0] + 1 == len(self.chosen)  # without gaps: a view will do
        self.index = None if self.whole else torch.tensor(self.chosen, device=device)

    def of(self, stack: Tensor) -> Tensor:
        """Their rows of a stacked tensor: a view where they are neighbours, else a copy."""
        if self.index is None:
            return stack[self.chosen[0] : self.chosen[-1] + 1]
        return stack.index_select(0, self.index)

    def put(self, stack: Tensor, rows: Tensor) -> None:
        """Write changed rows back, unless they are a view and so are there already."""
        if self.index is not None:
            stack.index_copy_(0, self.index, rows)


@dataclass
class Pass:
    """What one forward pass of several clients gives. leaves: the parameters by name, [R, ...], to which the gradients
    of the pass go. features [R, B, ...], logits [R, B, ...] and losses [R]."""

    leaves: dict[str, Tensor]
    features: Tensor
    logits: Tensor
    losses: Tensor


class StackedNet:
    """The networks of up to `count` clients, stacked: W [count, ...] for every tensor w that training may change.

        (f_k, o_k, L_k) = program(W_k, x_k, y_k) for all k at once,   by torch.func.vmap over functional_call

    `nets[k]` is an ordinary network whose tensors are the rows k of the stack: what is loaded into it, read from it or
    changed in it is loaded, read or changed in the stack. Frozen tensors are the same for all, and are not stacked.
    Random draws inside the network (dropout) are different for every client.
    """

    def __init__(self, net: Net, places: Mapping[str, str], count: int, task: TaskRules) -> None:
        self.task = task
        self.nets = [copy.deepcopy(net) for _ in range(count)]
        self.program = FeaturesAndLogits(copy.deepcopy(net))
        start_training(self.program, freeze(self.program.net, places))
        moving = {n: t for n, t in (*net.named_parameters(), *net.named_buffers()) if places.get(n) != "frozen"}
        self.stacks = {name: _joined(self.nets, name, tensor) for name, tensor in moving.items()}
        self.learned = [name for name, tensor in net.named_parameters() if name in moving and tensor.requires_grad]
        self.others = [name for name in moving if name not in set(self.learned)]
        self._rows: dict[tuple[int, ...], Rows] = {}

    def rows(self, chosen: Sequence[int]) -> Rows:
        """Rows of these clients, made once."""
        key = tuple(chosen)
        if key not in self._rows:
            self._rows[key] = Rows(key, next(iter(self.stacks.values())).device)
        return self._rows[key]

    def forward(self, rows: Rows, images: Tensor, labels: Tensor, autocast: Autocast = nullcontext) -> Pass:
        """One training pass of the rows' clients on batches [R, B, ...]; running statistics move.

        autocast: makes the context in which features and logits are computed (`LocalRound.autocast`)."""
        leaves = {name: rows.of(self.stacks[name]).detach().requires_grad_() for name in self.learned}
        others = {name: rows.of(self.stacks[name]) for name in self.others}
        with plain_moments():  # the fused form is a function of its own, which vmap cannot look into
            program = vmap(partial(self._one, autocast), randomness="different")
            features, logits, losses = program(leaves, others, images, labels)
        for name, value in others.items():
            rows.put(self.stacks[name], value)
        return Pass(leaves, features, logits, losses)

    def keep(self, rows: Rows, leaves: Mapping[str, Tensor]) -> None:
        """Write the rows' changed parameters into the stack."""
        for name, value in leaves.items():
            rows.put(self.stacks[name], value.detach())

    def _one(
        self,
        autocast: Autocast,
        leaves: Mapping[str, Tensor],
        others: Mapping[str, Tensor],
        images: Tensor,
        labels: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors = {PREFIX + name: tensor for name, tensor in (*leaves.items(), *others.items())}
        with autocast():
            features, logits = functional_call(self.program, tensors, (images,))
        return features, logits, self.task.loss(logits, labels)


def _joined(nets: Sequence[nn.Module], name: str, tensor: Tensor) -> Tensor:
    """The tensor of that name of all networks in one, of which each network's own becomes a row.

    On a GPU its layout is the plain one: under vmap, cuDNN's batch norm refuses maps in channels-last order.
    """
    values = tensor.detach().contiguous() if tensor.is_cuda else tensor.detach()
    stack = torch.stack([values] * len(nets))
    path, _, last = name.rpartition(".")
    for net, row in zip(nets, stack.unbind()):
        getattr(net.get_submodule(path), last).data = row
    return stack
