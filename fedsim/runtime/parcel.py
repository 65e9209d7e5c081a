"""The form in which the processes of one run send messages to each other: tensors separately from everything else.

Pickle protocol 5 does not copy the bytes of tensors. With Ray they are copied once, into the object store; a process
that reads them uses the object store's memory.
"""

import copyreg
import io
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, Context, Error, Message, RecordDict

from fedsim.common.errors import CLIENT_APP_RAISED
from fedsim.flower.identity import with_content
from fedsim.tensors.arrays import array_of, record_of

Kept = dict[str, Any]  # the bytes of a record's tensors by name, which a process has


def bytes_of(record: ArrayRecord) -> Kept:
    """The bytes of a record's tensors, whatever becomes of the record: the guard may put other tensors into it."""
    return {name: array.data for name, array in record.items()}


def parcel(record: ArrayRecord) -> tuple:
    """How an ArrayRecord is pickled (`object.__reduce__`); unpickling gives one in the memory of what was received."""
    heads = [(name, array.dtype, tuple(array.shape), array.stype) for name, array in record.items()]
    return unpack, (heads, [pickle.PickleBuffer(array.data) for array in record.values()])


class Parcel:
    """An ArrayRecord in the form that Ray transports; unpickling gives an ArrayRecord in the object store's memory."""

    def __init__(self, record: ArrayRecord) -> None:
        self.record = record

    def __reduce__(self) -> tuple:
        return parcel(self.record)


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


def written(message: Message, write: Callable[[ArrayRecord], tuple] = parcel) -> memoryview:
    """A message as bytes for `pickle.loads`, with its array records as `write` gives them (`object.__reduce__`)."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5)
    pickler.dispatch_table = {**copyreg.dispatch_table, ArrayRecord: write}
    pickler.dump(message)
    return buffer.getbuffer()


def answer(app: Callable[[Message, Context], Message], message: Message, contexts: Mapping[int, Context]) -> Message:
    """The client app's reply; what the app raises becomes an error reply."""
    try:
        return app(message, contexts[message.metadata.dst_node_id])
    except Exception:
        return Message(Error(CLIENT_APP_RAISED, traceback.format_exc()), reply_to=message)


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
