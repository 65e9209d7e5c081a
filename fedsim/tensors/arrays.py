"""Model states in messages: `state_dict` <-> Flower's ArrayRecord by name.

The format is Flower's own (`.npy` inside `flwr.app.Array`). Writing copies the tensors once; reading copies nothing.
"""

import functools
import io
import math
from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.lib import format as npy
from torch import nn

Tensors = Mapping[str, torch.Tensor]
Arrays = Mapping[str, np.ndarray]
NUMPY_STYPE = "numpy.ndarray"  # Flower's name of the .npy format
_PREFIX = 10  # bytes before the header in .npy version 1: magic (6), version (2), length of the header (2)
_VIEW = "fedsim_view"  # the attribute of an Array that was decoded by `keep_views`
_MAX_HEADER = 10_000  # numpy's own limit, a protection against harmful headers
_READERS = {  # of a header, by the version of the format
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
}


# ------------------------------------------------------------------------------------------------------------- encode


@functools.lru_cache(maxsize=4096)
def _header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """The .npy header of a C-ordered array; cached, because the same few hundred are needed in every round."""
    entry = {
        "descr": npy.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": shape,
    }
    buffer = io.BytesIO()
    npy.write_array_header_1_0(buffer, entry)
    return buffer.getvalue()


@functools.lru_cache(maxsize=64)
def _dtype_name(dtype: np.dtype) -> str:
    return str(dtype)


def _encode(name: str, value: torch.Tensor | np.ndarray) -> Array:
    try:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().numpy()
        array = np.asarray(value)
    except TypeError as error:  # bfloat16 and similar types do not exist in NumPy
        raise ValueError(f"{name}: {error}") from None
    if array.dtype.hasobject:
        raise ValueError(f"{name}: arrays of Python objects cannot be sent")
    header = _header(array.dtype, array.shape)
    return array_of(
        dtype=_dtype_name(array.dtype),
        shape=array.shape,
        stype=NUMPY_STYPE,
        data=_npy(header, array),
    )


def _npy(header: bytes, array: np.ndarray) -> bytes:
    """The header and the values in C order, by one copy, whatever the layout of the array (channels-last, for one)."""
    if array.flags.c_contiguous:
        payload = array.reshape(-1).view(np.uint8)
        return b"".join((header, payload))
    size = len(header) + array.nbytes
    buffer = io.BytesIO(bytes(size))
    with buffer.getbuffer() as view:
        view[: len(header)] = header
        np.copyto(np.frombuffer(view, array.dtype, offset=len(header)).reshape(array.shape), array)
    return buffer.getvalue()


def state_to_record(
    state: Mapping[str, torch.Tensor | np.ndarray],
    names: Collection[str] | None = None,
) -> ArrayRecord:
    """ArrayRecord of a state's tensors by name (all, or `names` in their order); dtypes and 0-d shapes are kept.

    The bytes are those of `flwr.app.Array(ndarray)` for C-ordered arrays; other layouts are written in C order.
    Raises ValueError, with the tensor's name, for a name that is missing and for a dtype that NumPy does not have.

        >>> record = state_to_record({"w": torch.tensor([1.0, 2.0])})
        >>> record_to_arrays(record)
        {'w': array([1., 2.], dtype=float32)}
    """
    listed = state if names is None else names
    missing = [name for name in listed if name not in state]
    if missing:
        raise ValueError(f"state lacks {missing[0]!r} ({len(missing)} missing)")
    arrays = {name: _encode(name, state[name]) for name in listed}
    return record_of(arrays)


def array_of(
    dtype: str,
    shape: tuple[int, ...],
    stype: str,
    data: bytes | memoryview,
) -> Array:
    """An Array of fields that are known to be well-formed; Flower's constructor takes longer and no memoryview."""
    array = Array.__new__(Array)
    array.__dict__.update(dtype=dtype, shape=shape, stype=stype, data=data)
    return array


def record_of(arrays: Mapping[str, Array]) -> ArrayRecord:
    """An ArrayRecord of Arrays that are known to be well-formed.

    Flower's constructor builds every Array a second time, and its `__setitem__` needs more time for checking types
    than the encoding of a small tensor takes. Only this function fills a record without them.
    """
    record = ArrayRecord()
    record.__dict__["_data"].update(arrays)
    return record


# ------------------------------------------------------------------------------------------------------------- decode


class _Header(NamedTuple):
    """What the header of .npy data says of the array; `nbytes` is the size of its payload."""

    dtype: np.dtype
    dtype_name: str
    shape: tuple[int, ...]
    order: Literal["C", "F"]
    nbytes: int


@functools.lru_cache(maxsize=4096)
def _parse_header(header: bytes) -> _Header:
    """Reads a whole .npy header. Raises ValueError for a malformed one."""
    buffer = io.BytesIO(header)
    version = npy.read_magic(buffer)
    if version not in _READERS:
        raise ValueError(f"unsupported .npy version {version}")
    try:
        shape, fortran_order, dtype = _READERS[version](buffer, max_header_size=_MAX_HEADER)
    except Exception as error:  # numpy's parser may raise any error for a harmful header, e.g. TokenError
        raise ValueError(f"malformed .npy header ({type(error).__name__})") from None
    if dtype.hasobject:
        raise ValueError("arrays of Python objects are refused")
    if any(size < 0 for size in shape):
        raise ValueError(f"negative size in shape {shape}")
    return _Header(
        dtype,
        dtype_name=str(dtype),
        shape=shape,
        order="F" if fortran_order else "C",
        nbytes=math.prod(shape) * dtype.itemsize,
    )


def _split(data: bytes | memoryview) -> tuple[bytes, int]:
    """Returns (the header of .npy bytes, the position where the payload starts). Raises ValueError for other bytes."""
    is_npy = data[:6] == npy.MAGIC_PREFIX
    if not is_npy or len(data) < _PREFIX + 2:
        raise ValueError("not .npy data")
    width = 2 if data[6] == 1 else 4
    length = int.from_bytes(data[8 : 8 + width], "little")
    start = 8 + width + length
    is_truncated = start > len(data)
    is_oversized = start > _MAX_HEADER + _PREFIX + 2
    if is_truncated or is_oversized:
        raise ValueError("truncated or oversized .npy header")
    return bytes(data[:start]), start  # a copy, because the header is cached and a view would keep the whole buffer


def _decode(array: Array) -> np.ndarray:
    if array.stype != NUMPY_STYPE:
        raise ValueError(f"serialization {array.stype!r} is not {NUMPY_STYPE!r}")
    header, start = _split(array.data)
    dtype, name, shape, order, expected = _parse_header(header)
    declared = array.dtype, tuple(array.shape)
    if declared != (name, shape):
        content = f"{name}{list(shape)}"
        raise ValueError(f"declared {array.dtype}{list(array.shape)} but holds {content}")
    present = len(array.data) - start
    if present != expected:
        raise ValueError(f"payload of {present} bytes, {expected} expected")
    if not present:
        return np.empty(shape, dtype)
    values = np.frombuffer(array.data, dtype, offset=start)
    return values.reshape(shape, order=order)


def record_to_arrays(record: ArrayRecord) -> dict[str, np.ndarray]:
    """Arrays of a record by name, as read-only views of its bytes (no copy).

    Raises ValueError naming the array for malformed, truncated, over-long or object data.
    """
    arrays = {}
    for name, array in record.items():
        view = array.__dict__.get(_VIEW)
        try:
            arrays[name] = _decode(array) if view is None else view
        except ValueError as error:
            raise ValueError(f"array {name!r}: {error}") from None
    return arrays


def keep_views(record: ArrayRecord) -> None:
    """Decodes a record once, for all who read its Arrays. A record that is pickled later would carry the views too."""
    for name, view in record_to_arrays(record).items():
        view.setflags(write=False)  # what one client wrote the next would read
        record[name].__dict__[_VIEW] = view


# --------------------------------------------------------------------------------------------------------------- load


class _Writable:
    """Presents a read-only array as writable without copying it.

    torch warns about read-only memory, but we only read the tensors that it makes.
    """

    def __init__(self, array: np.ndarray) -> None:
        interface = dict(array.__array_interface__)
        pointer, _ = interface["data"]
        interface["data"] = (pointer, False)  # not read-only
        self.array = array  # the array must exist as long as the tensor uses its memory
        self.__array_interface__ = interface


def _as_tensor(array: np.ndarray) -> torch.Tensor:
    if array.flags.writeable:
        return torch.from_numpy(array)
    if not array.size:
        return torch.from_numpy(array.copy())
    writable = np.asarray(_Writable(array))
    return torch.from_numpy(writable)


@functools.lru_cache(maxsize=64)
def _numpy_dtype(dtype: torch.dtype) -> np.dtype | None:
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        return None


def load_arrays(
    model: nn.Module | Tensors,
    arrays: Arrays,
    strict_names: Collection[str] | None = None,
) -> None:
    """Copies arrays into the model's parameters and buffers of the same names, in place.

    `model` may be its `state_dict` instead, because collecting it takes longer than filling a small model.
    `strict_names` are exactly the names that must be there (None: the whole `state_dict`). Everything is checked before
    anything is written. Raises ValueError with the first name that is missing or unexpected, or whose tensor has
    another shape or type.
    """
    state = model.state_dict() if isinstance(model, nn.Module) else model
    expected = set(state if strict_names is None else strict_names)
    _check_names(state, arrays, expected)
    for name, array in arrays.items():
        _check_tensor(name, array, state[name])
    is_on_cpu = all(state[name].is_cpu for name in arrays)
    if not is_on_cpu:
        tensors = {name: _as_tensor(array) for name, array in arrays.items()}
        fill(state, tensors)
        return
    with torch.no_grad():
        for name, array in arrays.items():
            values = state[name].numpy()
            np.copyto(values, array)


def _check_names(
    state: Tensors,
    arrays: Arrays,
    expected: set[str],
) -> None:
    """Raises ValueError for the first expected name that the model or the arrays lack, or for one too many."""
    unknown = expected - state.keys()
    if unknown:
        raise ValueError(f"the model has no tensor {min(unknown)!r}")
    missing = expected - arrays.keys()
    if missing:
        raise ValueError(f"missing tensor {min(missing)!r}")
    unexpected = arrays.keys() - expected
    if unexpected:
        raise ValueError(f"unexpected tensor {min(unexpected)!r}")


def _check_tensor(name: str, array: np.ndarray, tensor: torch.Tensor) -> None:
    """Raises ValueError for an array of another shape or type than the model's tensor."""
    shape = tuple(tensor.shape)
    if array.shape != shape:
        raise ValueError(f"{name!r}: shape {array.shape}, the model has {shape}")
    if array.dtype != _numpy_dtype(tensor.dtype):
        raise ValueError(f"{name!r}: dtype {array.dtype}, the model has {tensor.dtype}")


@torch.no_grad()
def fill(state: Tensors, values: Tensors) -> None:
    """Copies values into the tensors of the same names, which all are on one device."""
    if not values:
        return
    tensors = [state[name] for name in values]
    placed = moved(values, tensors[0].device)
    torch._foreach_copy_(tensors, list(placed.values()))


@torch.no_grad()
def moved(tensors: Tensors, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors on a device, in their order; those that are there are not copied.

    The others go in one copy for each type, since the host waits for every copy from or to a GPU: a network of a few
    hundred tensors would wait a few hundred times. To a GPU they go from pinned memory, and the host does not wait.
    They share the memory of that copy.
    """
    placed = {name: tensor.detach() for name, tensor in tensors.items()}
    to_gpu = device.type == "cuda"
    names_of_type: dict[torch.dtype, list[str]] = {}
    for name, tensor in placed.items():
        if tensor.device != device:
            names_of_type.setdefault(tensor.dtype, []).append(name)
    for dtype, names in names_of_type.items():
        parts = [placed[name].reshape(-1) for name in names]
        sizes = [part.numel() for part in parts]
        joined = torch.empty(
            sum(sizes),
            dtype=dtype,
            device=parts[0].device,
            pin_memory=to_gpu,
        )
        torch.cat(parts, out=joined)
        flat = joined.to(device, non_blocking=to_gpu)
        for name, values in zip(names, flat.split(sizes), strict=True):
            shape = placed[name].shape
            placed[name] = values.view(shape)
    return placed


def to_arrays(tensors: Tensors) -> dict[str, np.ndarray]:
    """The values of tensors, in their order; those of the CPU share the memory of their tensors."""
    on_cpu = moved(tensors, torch.device("cpu"))
    return {name: tensor.numpy() for name, tensor in on_cpu.items()}


# ------------------------------------------------------------------------------------------------------------ measures


def nbytes(arrays: ArrayRecord | Mapping[str, np.ndarray | torch.Tensor]) -> int:
    """Payload bytes of the tensors, without headers."""
    if not isinstance(arrays, ArrayRecord):
        return sum(value.nbytes for value in arrays.values())
    total = 0
    for array in arrays.values():
        itemsize = np.dtype(array.dtype).itemsize
        total += math.prod(array.shape) * itemsize
    return total


def all_finite(array: np.ndarray) -> bool:
    """Whether an array has no NaN and no infinity; one BLAS pass for float32 and float64; integers always pass."""
    if array.dtype.kind not in "fc":
        return True
    if array.dtype in (np.float32, np.float64):
        flat = array.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            squares = np.dot(flat, flat)
        # NaN and infinity make this sum non-finite. Large finite values may too, so then the entries are checked.
        if math.isfinite(squares):
            return True
    return bool(np.isfinite(array).all())
