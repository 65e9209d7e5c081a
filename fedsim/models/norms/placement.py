"""Where a norm part puts its layers: batch-norm layers of a net by stage, and their replacement."""

from collections.abc import Callable, Collection

from torch import nn

from fedsim.errors import UserError
from fedsim.models.net import Net


def batch_norm_paths(net: Net, stages: Collection[int] | None = None, stem: bool = True) -> list[str]:
    """Paths in `net` of its backbone's BatchNorm2d layers, in forward order of registration.

    `stages` keeps those inside the given stages (`net.stages`; None: all), `stem` adds those outside every stage.
    """
    inside = [prefix for stage, prefixes in net.stages.items() for prefix in prefixes]
    kept = [prefix for stage in net.stages if stages is None or stage in stages for prefix in net.stages[stage]]
    paths = []
    for name, module in net.backbone.named_modules(prefix="backbone"):
        if isinstance(module, nn.BatchNorm2d):
            in_stem = not any(_within(name, prefix) for prefix in inside)
            if (in_stem and stem) or any(_within(name, prefix) for prefix in kept):
                paths.append(name)
    return paths


def _within(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix + ".")


def require_batch_norm(net: Net, part: object) -> None:
    """Raise UserError when the backbone has no batch norm to replace (AlexNet, ViT, digits-cnn)."""
    if not batch_norm_paths(net):
        name = type(part).__name__
        raise UserError(f"norm {name} needs a backbone with batch norm; use digits-cnn-bn, a ResNet or densenet121")


def replace(net: nn.Module, paths: Collection[str], make: Callable[[nn.Module], nn.Module]) -> None:
    """Put `make(old)` in the place of every module in `paths`."""
    for path in paths:
        parent, _, name = path.rpartition(".")
        setattr(net.get_submodule(parent), name, make(net.get_submodule(path)))
