"""Ways in which a reply can be wrong. A mutation changes a draft of a good reply; it returns False if it cannot."""

import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from fedsim.tensors.arrays import NUMPY_STYPE, record_to_arrays

Mutation = Callable[["Draft", random.Random, Any], bool | None]
ALL = ("train", "evaluate", "collect")
MUTATIONS: dict[str, tuple[Mutation, tuple[str, ...]]] = {}


@dataclass
class Draft:
    """A reply's records as plain tables, so that they can be changed in every way in which a message can be wrong."""

    arrays: dict[str, dict[str, Any]]
    metrics: dict[str, dict[str, Any]]
    configs: dict[str, dict[str, Any]]
    others: dict[str, Any]
    error: Error | None = None

    @classmethod
    def of(cls, reply: Message) -> "Draft":
        """The draft of a good reply."""
        content = reply.content
        tables = (content.array_records, content.metric_records, content.config_records)
        return cls(*({name: dict(record) for name, record in table.items()} for table in tables), {})

    def reply(self, message: Message) -> Message:
        """The reply to a message, made without the checks of Flower's constructors on the sender's side."""
        if self.error:
            return Message(self.error, reply_to=message)
        content = RecordDict()
        kinds = ((ArrayRecord, self.arrays), (MetricRecord, self.metrics), (ConfigRecord, self.configs))
        for kind, table in kinds:
            for name, entries in table.items():
                record = kind()
                record.__dict__["_data"].update(entries)
                content.__dict__["_data"][name] = record
        content.__dict__["_data"].update(self.others)
        return Message(content, reply_to=message)

    def pick(self, rng: random.Random, kinds: str = "fiu") -> tuple[str, str, np.ndarray] | None:
        """Record, name and a copy of one tensor of these kinds."""
        found = [
            (record, name, array)
            for record, entries in self.arrays.items()
            for name, array in record_to_arrays(entries).items()
            if array.dtype.kind in kinds and array.size
        ]
        if not found:
            return None
        record, name, array = rng.choice(found)
        return record, name, np.array(array)


def mutation(*phases: str) -> Callable[[Mutation], Mutation]:
    """Register a mutation for the replies of some phases."""

    def register(function: Mutation) -> Mutation:
        MUTATIONS[function.__name__] = (function, phases)
        return function

    return register


# --- tensors ------------------------------------------------------------------------------------------------------


@mutation("train", "collect")
def not_finite(draft: Draft, rng: random.Random, odd: Any) -> bool:
    """NaN or an infinity somewhere."""
    record, name, array = draft.pick(rng, "f")
    array.reshape(-1)[rng.randrange(array.size)] = rng.choice([np.nan, np.inf, -np.inf])
    draft.arrays[record][name] = Array(array)
    return True


@mutation("train", "collect")
def wrong_shape(draft: Draft, rng: random.Random, odd: Any) -> bool:
    """One axis more, only one axis, one number less, a scalar instead of a vector, or a vector instead of a scalar."""
    record, name, array = draft.pick(rng)
    changed = rng.choice(
        [array[None], array.reshape(-1), array.reshape(-1)[1:], array.reshape(-1)[0], array[..., None]]
    )
    changed = np.asarray(changed)
    if changed.shape == array.shape or (record != "arrays" and changed.ndim == array.ndim):
        return False  # a bank does not know how many styles a client has
    draft.arrays[record][name] = Array(changed)
    return True


@mutation("train", "collect")
def wrong_dtype(draft: Draft, rng: random.Random, odd: Any) -> bool:
    """Another precision, another kind, another byte order."""
    record, name, array = draft.pick(rng)
    dtype = np.dtype(rng.choice(["f8", "f2", "c8", "i4", "u1", "?", ">f4", ">i8"]))
    if dtype == array.dtype:
        return False
    draft.arrays[record][name] = Array(array.astype(dtype))
    return True


@mutation("train", "collect")
def names(draft: Draft, rng: random.Random, odd: Any) -> bool:
    """A tensor missing, one too many, or one under another name."""
    record, name, array = draft.pick(rng)
    entries = draft.arrays[record]
    change = rng.choice(["drop", "add", "rename", "empty"])
    if change in ("drop", "rename"):
        del entries[name]
    if change in ("add", "rename"):
        entries[f"{odd!s}'{rng.random()}"] = Array(array)
    if change == "empty":
        entries.clear()
    return True


@mutation("train", "collect")
def damaged_bytes(draft: Draft, rng: random.Random, odd: Any) -> bool:
    """Truncated, prolonged, random or no bytes."""
    record, name, array = draft.pick(rng)
    data = Array(array).data
    cut = rng.randrange(len(data))
    damaged = rng.choice(
        [data[:cut], data + bytes(1 + rng.randrange(9)), rng.randbytes(len(data)), b"", data[cut + 1 :]]
    )
    draft.arrays[record][name] = Array(str(array.dtype), array.shape, NUMPY_STYPE, damaged)
    return True


@mutation("train", "collect")
def pickled(draft: Draft, rng: random.Random, odd: Any) -> bool:
    """An object array, as `.npy` pickles it."""
    record, name, array = draft.pick(rng)
    buffer = io.BytesIO()
    np.save(buffer, np.array([odd, None], dtype=object), allow_pickle=True)
    dtype = rng.choice(["object", str(array.dtype)])
    draft.arrays[record][name] = Array(dtype, (2,), NUMPY_STYPE, buffer.getvalue())
    return True


@mutation("train", "collect")
def lying_declaration(draft: Draft, rng: random.Random, odd: Any) -> bool:
    """What is declared about a tensor does not agree with its bytes, or is not a tensor."""
    record, name, array = draft.pick(rng)
    data, shape, dtype = Array(array).data, array.shape, str(array.dtype)
    fake = Array(dtype, shape, NUMPY_STYPE, data)
    change = rng.randrange(5)
    if change == 0:
        fake.shape = rng.choice([(*shape, 2), (10**12,), (-1, 4), (2**70,), ("x",), None, 3])
    elif change == 1:
        fake.dtype = rng.choice(["float99", "", "object", "O", "V8", "f8", "'", None, 7])
    elif change == 2:
        fake.stype = rng.choice(["pickle", "", "torch.tensor", None])
    elif change == 3:
        fake.data = rng.choice(["text", None, 12])
    else:
        fake = odd
    draft.arrays[record][name] = fake
    return True


@mutation("train", "collect")
def hostile_header(draft: Draft, rng: random.Random, odd: Any) -> bool:
    """A header that announces terabytes, has nested brackets, or is not a dictionary."""
    record, name, array = draft.pick(rng)
    shape = rng.choice([(10**13,), (0, 10**30), (2**63,), (-5,), array.shape])
    text = rng.choice(
        [
            f"{{'descr': '{array.dtype.str}', 'fortran_order': False, 'shape': {shape}, }}",
            f"{{'descr': '|V0', 'fortran_order': False, 'shape': {shape}, }}",
            "(" * 9000,
            "__import__('os').getpid()",
            "{'descr': [('a', '<f4'), ('b', '|O')], 'fortran_order': False, 'shape': (1,), }",
            repr(odd),
        ]
    ).encode("utf-8", "replace")[:60_000]
    data = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(rng.randrange(64))
    draft.arrays[record][name] = Array(str(array.dtype), shape, NUMPY_STYPE, data)
    return True


@mutation("train")
def impossible_statistics(draft: Draft, rng: random.Random, odd: Any) -> bool:
    """A negative variance, a negative or an absurd counter."""
    arrays = record_to_arrays(draft.arrays["arrays"])
    found = [name for name in arrays if name.endswith(("running_var", "num_batches_tracked"))]
    if not found:
        return False
    name = rng.choice(found)
    array = np.array(arrays[name])
    counter = array.dtype.kind == "i"
    array.reshape(-1)[rng.randrange(array.size)] = rng.choice(
        [-1, -(2**62), 2**62, 2**63 - 1] if counter else [-1e-3, -1e30]
    )
    draft.arrays["arrays"][name] = Array(array)
    return True


@mutation("collect")
def impossible_contribution(draft: Draft, rng: random.Random, odd: Any) -> bool:
    """A standard deviation that is not positive, a negative amplitude, nothing at all."""
    ((record, entries),) = draft.arrays.items()
    arrays = {name: np.array(array) for name, array in record_to_arrays(entries).items()}
    name = "std" if record == "style" else "amplitude"
    array = arrays[name]
    array.reshape(-1)[rng.randrange(array.size)] = -rng.random() - 1e-6
    if rng.random() < 0.3:
        array = array[:0]
    draft.arrays[record][name] = Array(array)
    return True
