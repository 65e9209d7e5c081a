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


class OtherTensor(Tensor):
    """A tensor of the other device; its values are in `on_cpu`."""

    on_cpu: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> "OtherTensor":
        """The same shape, layout and type, on the other device."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype,
            device=OTHER,
        )  # fmt: skip
        made.on_cpu = values
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # PyTorch calls it on the class, and its types say otherwise
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Every operation."""
        return computed(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> "OtherTensor":
        made = OtherTensor(self.on_cpu.clone()).requires_grad_(self.requires_grad)
        made.__dict__.update({name: value for name, value in self.__dict__.items() if name != "on_cpu"})
        return memo.setdefault(id(self), made)


def computed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operation gives: on the other device if one of its tensors is there, or if that is asked for."""
    seen: list[Tensor] = []
    tree_map_only(Tensor, seen.append, (args, kwargs))
    here = [tensor for tensor in seen if not isinstance(tensor, OtherTensor) and tensor.dim()]
    other = len(seen) > len([tensor for tensor in seen if not isinstance(tensor, OtherTensor)])
    name, asked = func._schema.name, kwargs.get("device")
    if other and here and name not in COPIES:
        raise RuntimeError(f"{name} has tensors on the run's device and on the CPU, {tuple(here[0].shape)}")
    inner_args, inner_kwargs = tree_map_only(OtherTensor, lambda tensor: tensor.on_cpu, (tuple(args), dict(kwargs)))
    if asked is not None:
        inner_kwargs["device"] = torch.device("cpu")
    result = func(*inner_args, **inner_kwargs)
    if func._schema.is_mutable and name.endswith("_"):  # in place: the tensor itself, or nothing
        return args[0] if func._schema.returns else None
    if torch.device(asked) != OTHER if asked is not None else not other:
        return result
    # In inference mode a view of a tensor from outside belongs to that tensor, which counts its changes.
    inside = torch.is_inference_mode_enabled() and all(tensor.is_inference() for tensor in seen)
    with torch.inference_mode(inside):
        return tree_map_only(Tensor, OtherTensor, result)


class _Everywhere(TorchDispatchMode):
    """Also operations without a tensor of the other device, which may make one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Functions of PyTorch that make a tensor of data, or read one, without an operation."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs, asked = kwargs or {}, (kwargs or {}).get("device")
        if func in WITH_DATA and asked is not None and torch.device(asked) == OTHER:
            return func(*args, **{**kwargs, "device": None}).to(OTHER)
        if args and isinstance(args[0], OtherTensor):
            if func is Tensor.new_tensor:
                return torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs, "device": None}).to(asked or OTHER)
            if func is Tensor.tolist:
                return args[0].cpu().tolist()
        return func(*args, **kwargs)


@contextlib.contextmanager
def other_device() -> Iterator[None]:
    """Inside the block, runs compute on the other device."""
    autocast, changed = torch.autocast, torch.__future__.get_overwrite_module_params_on_conversion()

    def not_there(kind: str, *args: Any, **named: Any) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if kind == OTHER.type else autocast(kind, *args, **named)

    workspace.close_workspaces()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # PyTorch warns of what it cannot do with tensors of "meta"
        stack.enter_context(mock.patch.object(torch, "autocast", not_there))
        stack.enter_context(mock.patch.object(workspace, "pick_device", return_value=OTHER))
        for module in [
            module_of_torch for name, module_of_torch in sys.modules.items() if name.startswith("torch.optim.")
        ]:
            if hasattr(module, "_get_fused_kernels_supported_devices"):
                kinds = ["cpu", OTHER.type]
                stack.enter_context(
                    mock.patch.object(module, "_get_fused_kernels_supported_devices", return_value=kinds)
                )
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, changed)
        stack.callback(workspace.close_workspaces)
        stack.enter_context(_Functions())
        stack.enter_context(_Everywhere())
        yield
