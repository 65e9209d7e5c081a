"""Where a norm part puts its layers: the batch-norm layers of a network by stage, and their replacement."""

from collections.abc import Callable, Collection
from typing import TypeVar

from torch import Tensor, nn

from fedsim.models.net import Net

M = TypeVar("M", bound=nn.Module)


def batch_norm_paths(net: Net, stages: Collection[int] | None = None, stem: bool = True) -> list[str]:
    """The paths in `net` of its backbone's BatchNorm2d layers, in the order of registration.

    `stages` selects those inside the given stages (`net.stages`; None: all), and `stem` adds those outside every stage.
    """
    inside = [prefix for stage, prefixes in net.stages.items() for prefix in prefixes]
    prefixes = [prefix for stage in net.stages if stages is None or stage in stages for prefix in net.stages[stage]]
    paths = []
    for name, module in net.backbone.named_modules(prefix="backbone"):
        if isinstance(module, nn.BatchNorm2d):
            in_stem = not any(within(name, prefix) for prefix in inside)
            if (in_stem and stem) or any(within(name, prefix) for prefix in prefixes):
                paths.append(name)
    return paths


def within(path: str, prefix: str) -> bool:
    """Whether a module's path is `prefix` or below it."""
    return path == prefix or path.startswith(prefix + ".")


class NormThenAct(nn.Module):
    """A replaced norm with the activation that the replaced layer had inside: `y = act(drop(norm(x)))`.

    timm's BatchNormAct2d is batch norm, optional dropout and activation in one module. A norm part replaces batch norm
    alone, so that the three are separated where a part replaces such a layer.
    """

    def __init__(self, norm: nn.Module, drop: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.norm, self.drop, self.act = norm, drop, act

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> the same shape."""
        return self.act(self.drop(self.norm(x)))


def plain_batch_norm(layer: nn.Module) -> nn.Module:
    """The layer itself, or for a subclass of BatchNorm2d a BatchNorm2d that shares its tensors."""
    if not isinstance(layer, nn.BatchNorm2d) or type(layer) is nn.BatchNorm2d:
        return layer
    plain = nn.BatchNorm2d(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
    plain.weight, plain.bias = layer.weight, layer.bias
    for name, buffer in layer.named_buffers(recurse=False):
        setattr(plain, name, buffer)
    return plain.train(layer.training)


def copied_from(old: nn.Module, new: M) -> M:
    """The new layer, which remembers that its tensors are copies of the old one's channels (`model.train` asks)."""
    new.__dict__["took_over"] = old  # not a submodule: the old layer does not belong to the network any more
    return new


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
         "_forward_hooks_always_called")  # fmt: skip


def move_hooks(old: nn.Module, new: nn.Module) -> None:
    """The hooks of the old module stand around the new one, and no longer around the old, which the new may call.

    PyTorch's tables themselves change places, since the handles that remove a hook refer to them."""
    for name in HOOKS:
        tables = getattr(new, name), getattr(old, name)
        setattr(old, name, tables[0])
        setattr(new, name, tables[1])


def replace(net: nn.Module, paths: Collection[str], make: Callable[..., nn.Module]) -> None:
    """Replaces every module in `paths` by `make(old)`. An activation inside the old one is kept after the new one. The
    hooks of the old one, which inserts register before rules come, are then those of the whole."""
    for path in paths:
        parent, _, name = path.rpartition(".")
        old = net.get_submodule(path)
        new = make(plain_batch_norm(old))
        if act := getattr(old, "act", None):
            new = NormThenAct(new, getattr(old, "drop", nn.Identity()), act)
        move_hooks(old, new)
        setattr(net.get_submodule(parent), name, new)
