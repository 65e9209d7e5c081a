"""What a tensor of a network is for: its kind, decided by the type of the module that owns it and never by its name."""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Literal

from torch import nn


class Kind(StrEnum):
    """The kind of a state entry, decided by the type of the module that owns it, never by its name."""

    WEIGHT = "weight"
    BN_AFFINE = "bn-affine"
    BN_STATISTICS = "bn-statistics"
    COUNTER = "counter"


BN_KINDS = frozenset({Kind.BN_AFFINE, Kind.BN_STATISTICS})


def _own_kinds(module: nn.Module) -> Iterator[tuple[str, Kind]]:
    """Yields (name, kind) of the tensors that belong to `module` itself, and not to its children."""
    declared: Mapping[str, Kind] = getattr(module, "tensor_kinds", {})
    of_parameters = of_floats = Kind.WEIGHT
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        of_parameters = Kind.BN_AFFINE
        of_floats = Kind.BN_STATISTICS
    for name, _ in module.named_parameters(recurse=False):
        yield name, declared.get(name, of_parameters)
    for name, buffer in module.named_buffers(recurse=False):
        by_type = of_floats if buffer.is_floating_point() else Kind.COUNTER
        yield name, declared.get(name, by_type)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def tensor_kinds(model: nn.Module) -> dict[str, Kind]:
    """Kind of every `state_dict` entry, in `state_dict` order.

    BatchNorm modules are found by type; a module of our own declares the class attribute
    `tensor_kinds: ClassVar[dict[str, Kind]]` for its direct tensors. Other float tensors are WEIGHT, integers COUNTER.

        >>> {name: str(kind) for name, kind in tensor_kinds(nn.BatchNorm1d(2)).items()}["running_mean"]
        'bn-statistics'
    """
    kinds = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, kind in _own_kinds(module):
            kinds[_join(prefix, name)] = kind
    return {name: kinds[name] for name in model.state_dict()}


def bn_scope(model: nn.Module, scope: Literal["all", "xan"] = "all") -> list[str]:
    """The names of the batch-norm entries, in `state_dict` order: affine parameters, statistics and counters.

    `all`: of every batch-norm layer (FedBN). `xan`: only inside XAN layers, with their score `s_bn` (the tensors that
    gPerXAN keeps on the client); such layers have the class attribute `bn_group = "xan"`.
    """
    if scope not in ("all", "xan"):
        raise ValueError(f"bn_scope: scope is 'all' or 'xan', not {scope!r}")
    roots = []
    if scope == "all":
        roots.append(("", model))
    else:
        for path, module in model.named_modules(remove_duplicate=False):
            if getattr(module, "bn_group", None) == scope:
                roots.append((path, module))
    names: set[str] = set()
    for prefix, root in roots:
        for path, owner in root.named_modules(prefix=prefix, remove_duplicate=False):
            kinds = dict(_own_kinds(owner))
            if BN_KINDS.isdisjoint(kinds.values()):
                continue
            for name, kind in kinds.items():
                if kind in BN_KINDS or kind is Kind.COUNTER:  # a counter belongs to batch norm when its layer does
                    names.add(_join(path, name))
    return [name for name in model.state_dict() if name in names]


def nonnegative_names(model: nn.Module) -> list[str]:
    """The names of the variances and counters of normalization layers, which are never negative in a valid model."""
    names = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, kind in _own_kinds(module):
            is_variance = kind is Kind.BN_STATISTICS and name == "running_var"
            if kind is Kind.COUNTER or is_variance:
                names.append(_join(prefix, name))
    return names
