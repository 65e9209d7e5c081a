"""Messages as bytes for the other processes of a run: tensors separately from everything else.

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

TensorBytes = dict[str, Any]  # the bytes of a record's tensors by name


def tensor_bytes(record: ArrayRecord) -> TensorBytes:
    """Return the bytes of a record's tensors, which stay: the guard may put other tensors into the record."""
    return {name: array.data for name, array in record.items()}


def reduced(record: ArrayRecord) -> tuple:
    """Return how an ArrayRecord is pickled (`object.__reduce__`); unpickling makes one in the memory of the bytes."""
    heads = [(name, array.dtype, tuple(array.shape), array.stype) for name, array in record.items()]
    return unpack, (heads, [pickle.PickleBuffer(array.data) for array in record.values()])


class RecordBytes:
    """An ArrayRecord in the form that Ray transports; unpickling gives an ArrayRecord in the object store's memory."""

    def __init__(self, record: ArrayRecord) -> None:
        self.record = record

    def __reduce__(self) -> tuple:
        return reduced(self.record)


def unpack(heads: Sequence[tuple[str, str, tuple[int, ...], str]], buffers: Sequence) -> ArrayRecord:
    """Return an ArrayRecord whose arrays are read-only views of the buffers; nothing is copied."""
    arrays = {}
    for (name, dtype, shape, stype), buffer in zip(heads, buffers, strict=True):
        arrays[name] = array_of(dtype, shape, stype, buffer if isinstance(buffer, bytes) else memoryview(buffer))
    return record_of(arrays)


def without_arrays(message: Message) -> Message:
    """Return the message without its array records."""
    small = RecordDict()
    for name, record in message.content.items():
        if not isinstance(record, ArrayRecord):
            small[name] = record
    return with_content(message, small)


def message_bytes(message: Message, reduce: Callable[[ArrayRecord], tuple] = reduced) -> memoryview:
    """Return a message as bytes for `pickle.loads`, with its array records as `reduce` gives them."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5)
    pickler.dispatch_table = {**copyreg.dispatch_table, ArrayRecord: reduce}
    pickler.dump(message)
    return buffer.getbuffer()


def answer(app: Callable[[Message, Context], Message], message: Message, contexts: Mapping[int, Context]) -> Message:
    """Return the client app's reply; what the app raises becomes an error reply."""
    try:
        return app(message, contexts[message.metadata.dst_node_id])
    except Exception:
        return Message(Error(CLIENT_APP_RAISED, traceback.format_exc()), reply_to=message)


def with_arrays(reply: Message, records: Mapping[str, ArrayRecord]) -> Message:
    """Return a reply with the array records that were sent apart from it."""
    return with_content(reply, RecordDict({**records, **reply.content})) if records else reply


def position_among(record: ArrayRecord, shared: Sequence[TensorBytes]) -> int | None:
    """Return the first position in `shared` with all tensors of the record in the same memory; None without any."""
    for position, tensors in enumerate(shared):
        if len(record) and all(tensors.get(name) is array.data for name, array in record.items()):
            return position
    return None


def select(record: ArrayRecord, names: Sequence[str]) -> ArrayRecord:
    """Return some tensors of a record, without a copy."""
    return record_of({name: record[name] for name in names})
