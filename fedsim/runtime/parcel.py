"""The form in which the processes of one run send messages to each other: tensors separately from everything else.

Pickle protocol 5 does not copy the bytes of tensors. With Ray they are copied once, into the object store; a process
that reads them uses the object store's memory.
"""

import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, Context, Error, Message, RecordDict

from fedsim.common.errors import CLIENT_APP_RAISED
from fedsim.flower.identity import with_content
from fedsim.tensors.arrays import array_of, record_of
from fedsim.tensors.records import arrays_of

Kept = dict[str, Any]  # the bytes of a record's tensors by name, which a process has


def bytes_of(record: ArrayRecord) -> Kept:
    """The bytes of a record's tensors, whatever becomes of the record: the guard may put other tensors into it."""
    return {name: array.data for name, array in record.items()}


class Parcel:
    """An ArrayRecord in the form that Ray transports; unpickling gives an ArrayRecord in the object store's memory."""

    def __init__(self, record: ArrayRecord) -> None:
        self.record = record

    def __reduce__(self) -> tuple:
        heads = [(name, array.dtype, tuple(array.shape), array.stype) for name, array in self.record.items()]
        return unpack, (heads, [pickle.PickleBuffer(array.data) for array in self.record.values()])


def unpack(heads: Sequence[tuple[str, str, tuple[int, ...], str]], buffers: Sequence) -> ArrayRecord:
    """ArrayRecord whose arrays are read-only views of the buffers; nothing is copied."""
    arrays = {}
    for (name, dtype, shape, stype), buffer in zip(heads, buffers, strict=True):
        arrays[name] = array_of(dtype, shape, stype, buffer if isinstance(buffer, bytes) else memoryview(buffer))
    return record_of(arrays)


def without_arrays(message: Message) -> Message:
    """The message without its array records."""
    small = RecordDict()
    for name, record in message.content.items():
        if not isinstance(record, ArrayRecord):
            small[name] = record
    return with_content(message, small)


def answer(
    app: Callable[[Message, Context], Message], message: Message, contexts: Mapping[int, Context]
) -> tuple[Message, dict[str, Parcel]]:
    """The client app's reply without its array records, and these; what the app raises becomes an error reply."""
    try:
        reply = app(message, contexts[message.metadata.dst_node_id])
    except Exception:
        reply = Message(Error(CLIENT_APP_RAISED, traceback.format_exc()), reply_to=message)
    if reply.has_error():
        return reply, {}
    return without_arrays(reply), {name: Parcel(record) for name, record in arrays_of(reply.content).items()}


def joined(reply: Message, records: Mapping[str, ArrayRecord]) -> Message:
    """A reply with the array records that were sent apart from it."""
    return with_content(reply, RecordDict({**records, **reply.content})) if records else reply


def standing(record: ArrayRecord, kept: Sequence[Kept]) -> int | None:
    """The position of the kept tensors that have all of this record, in the same memory; None when there are none."""
    for position, other in enumerate(kept):
        if len(record) and all(other.get(name) is array.data for name, array in record.items()):
            return position
    return None


def select(record: ArrayRecord, names: Sequence[str]) -> ArrayRecord:
    """Some tensors of a record, without a copy."""
    return record_of({name: record[name] for name in names})
