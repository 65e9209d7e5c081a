"""A device on machines that have none: it finds tensors that are left on the CPU while others are on the run's device.

Tensors of this device have their values on the CPU, and say that they are elsewhere: to PyTorch their device is "meta".
An operation on tensors of both kinds is refused, as a GPU refuses it, and NumPy cannot read them.
"""

import contextlib
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fedsim.runs import workspace

OTHER = torch.device("meta")
COPIES = {"aten::copy_", "aten::_to_copy", "aten::index", "aten::index_put", "aten::index_put_"}  # of either kind
WITH_DATA = (torch.tensor, torch.as_tensor)
FUSED = "_get_fused_kernels_supported_devices"  # by which an optimizer asks where it has fused kernels


class OtherTensor(Tensor):
    """A tensor of the other device; its values are in `on_cpu`."""

    on_cpu: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> "OtherTensor":
        """Makes a tensor of the same shape, layout and type, on the other device."""
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=OTHER,
        )
        made.on_cpu = values
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # PyTorch calls it on the class, and its types say otherwise
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Computes an operation that has a tensor of this class."""
        return computed(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> "OtherTensor":
        made = OtherTensor(self.on_cpu.clone()).requires_grad_(self.requires_grad)
        attributes = {name: value for name, value in self.__dict__.items() if name != "on_cpu"}
        made.__dict__.update(attributes)
        return memo.setdefault(id(self), made)


def computed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns what an operation gives: on the other device if one of its tensors is there, or if that is asked for.

    Raises RuntimeError for an operation on tensors of both devices, unless it copies or indexes.
    """
    tensors: list[Tensor] = []
    tree_map_only(Tensor, tensors.append, (args, kwargs))
    on_cpu = [tensor for tensor in tensors if not isinstance(tensor, OtherTensor)]
    is_there = len(on_cpu) < len(tensors)
    name = func._schema.name
    if is_there and name not in COPIES:
        _refuse_elements(name, on_cpu)
    inner_args, inner_kwargs = tree_map_only(OtherTensor, lambda tensor: tensor.on_cpu, (tuple(args), dict(kwargs)))
    asked = kwargs.get("device")
    if asked is not None:
        inner_kwargs["device"] = torch.device("cpu")
        is_there = torch.device(asked) == OTHER
    result = func(*inner_args, **inner_kwargs)
    if func._schema.is_mutable and name.endswith("_"):  # in place: the tensor itself, or nothing
        return args[0] if func._schema.returns else None
    if not is_there:
        return result
    # In inference mode a view of a tensor from outside belongs to that tensor, which counts its changes.
    inside = torch.is_inference_mode_enabled() and all(tensor.is_inference() for tensor in tensors)
    with torch.inference_mode(inside):
        return tree_map_only(Tensor, OtherTensor, result)


def _refuse_elements(name: str, on_cpu: Sequence[Tensor]) -> None:
    """Raises RuntimeError for a tensor on the CPU that has dimensions; a GPU takes single numbers from there, too."""
    for tensor in on_cpu:
        if tensor.dim():
            raise RuntimeError(f"{name} has tensors on the run's device and on the CPU, {tuple(tensor.shape)}")


class _Everywhere(TorchDispatchMode):
    """Also operations without a tensor of the other device, which may make one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Functions of PyTorch that make a tensor of data, or read one, without an operation."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked = kwargs.get("device")
        on_cpu = {**kwargs, "device": None}
        if func in WITH_DATA and asked is not None and torch.device(asked) == OTHER:
            return func(*args, **on_cpu).to(OTHER)
        if not args or not isinstance(args[0], OtherTensor):
            return func(*args, **kwargs)
        tensor, *others = args
        if func is Tensor.new_tensor:
            options = {"dtype": tensor.dtype, **on_cpu}
            return torch.tensor(*others, **options).to(asked or OTHER)
        if func is Tensor.tolist:
            return tensor.cpu().tolist()
        return func(*args, **kwargs)


@contextlib.contextmanager
def other_device() -> Iterator[None]:
    """Inside the block, runs compute on the other device."""
    autocast = torch.autocast

    def not_there(kind: str, *args: Any, **named: Any) -> contextlib.AbstractContextManager:
        if kind == OTHER.type:
            return contextlib.nullcontext()
        return autocast(kind, *args, **named)

    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    patches: list[contextlib.AbstractContextManager] = [
        mock.patch.object(torch, "autocast", not_there),
        mock.patch.object(workspace, "pick_device", return_value=OTHER),
    ]
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.optim.") and hasattr(module, FUSED):
            patches.append(mock.patch.object(module, FUSED, return_value=["cpu", OTHER.type]))
    workspace.close_workspaces()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # PyTorch warns of what it cannot do with tensors of "meta"
        for patch in patches:
            stack.enter_context(patch)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        stack.callback(workspace.close_workspaces)
        stack.enter_context(_Functions())
        stack.enter_context(_Everywhere())
        yield
