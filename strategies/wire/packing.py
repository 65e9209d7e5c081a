"""A message in few parts, because Flower sends every record and every Array in requests of its own.

In a deployment each of them costs two HTTP requests between each two of server app, SuperLink, SuperNode and client
app. A message is therefore packed just before Flower takes it and unpacked just after. No other code sees packed
messages, and the bytes of the tensors are the same.

Each record with tensors gets one Array `packed-1` of type uint8, which messages with the same record share, with this
content:

    8 bytes      length of the header, little-endian
    header       JSON: [[name, dtype, shape, serialization, bytes], ...], at most MOST_HEADER bytes
    payloads     the Arrays' own bytes (`.npy`), one after the other in the header's order

A message of few bytes (MOST_WHOLE) then becomes one ConfigRecord `whole-1`, whose one value is the packed content as
Flower writes it (protobuf).

Nothing is unpickled. Every length is compared before anything is cut: the payloads fill the rest of the buffer exactly,
so that unpacking never makes a record larger.
"""

import json
from collections.abc import Mapping
from typing import Annotated

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from google.protobuf.message import DecodeError
from pydantic import Field, StrictStr, TypeAdapter, ValidationError

from fedsim.flower.private import private
from fedsim.tensors.arrays import array_of, record_of, record_to_arrays, state_to_record
from fedsim.tensors.records import arrays_of, config_of

PACKED, WHOLE = "packed-1", "whole-1"
# The key of a message's config that asks for a reply in this form. A server of another version, which asks for another
# one, gets a reply that is not packed, and can say that the versions differ.
ANSWER = "packed"
MOST_WHOLE = 1 << 18  # bytes of a message that is sent as one record
MOST_HEADER = 1 << 20  # bytes; a record whose header would be longer (10,000 tensors) is sent as it is
_LENGTH = 8

Packed = dict[int, ArrayRecord]  # packed records by the identity of their record
Size = Annotated[int, Field(strict=True, ge=0, lt=1 << 62)]
ROWS = TypeAdapter(list[tuple[StrictStr, StrictStr, list[Size], StrictStr, Size]])  # name, dtype, shape, kind, bytes


def packed_message(content: RecordDict, packed: Packed) -> RecordDict:
    """The content of a message, packed, with a config that asks for such a reply (ANSWER). `packed`: see `pack`."""
    if "config" in content:
        config = ConfigRecord({**config_of(content), ANSWER: WHOLE})
        content = RecordDict({**content, "config": config})
    return pack(content, packed)


def answer(request: RecordDict, content: RecordDict) -> RecordDict:
    """The content of a reply as the request asks for it: packed or not (within one process nothing is packed)."""
    form = config_of(request).get(ANSWER)
    if form != WHOLE:
        return content
    return pack(content)


def pack(content: RecordDict, packed: Packed | None = None) -> RecordDict:
    """The content of a message as one record, or with every record of several tensors packed; itself when it is none.

    `packed`: packed records by the identity of their record, kept between messages that share records.
    """
    packed = {} if packed is None else packed
    records = arrays_of(content)
    replaced: dict[str, ArrayRecord] = {}
    for name, record in records.items():
        key = id(record)
        if key not in packed:
            packed[key] = pack_record(record)
        replaced[name] = packed[key]
    content = _with(content, replaced)
    if not records and len(content) < 2:
        return content
    return _whole(content)


def _whole(content: RecordDict) -> RecordDict:
    """Packed content as one record; the content itself when it is too large for that."""
    size = 0
    for record in arrays_of(content).values():
        size += sum(len(array.data) for array in record.values())
    if size > MOST_WHOLE:
        return content
    to_proto = private("flwr.common.serde:recorddict_to_proto")
    message = to_proto(content).SerializeToString()
    if len(message) > MOST_WHOLE:
        return content
    return RecordDict({WHOLE: ConfigRecord({WHOLE: message})})


def unpack(content: RecordDict) -> RecordDict:
    """The content with unpacked records, as before `pack`; the content itself when nothing is packed.

    Raises ValueError with the name of the record when a packed record is malformed. Tensors are views of the packed
    bytes.
    """
    if set(content) == {WHOLE}:
        message = config_of(content, WHOLE).get(WHOLE)
        content = _unpack_whole(message)
    records: dict[str, ArrayRecord] = {}
    for name, record in arrays_of(content).items():
        try:
            records[name] = unpack_record(record)
        except ValueError as error:
            raise ValueError(f"record {name!r}: {error}") from None
    return _with(content, records)


def _unpack_whole(message: object) -> RecordDict:
    """The content that these bytes hold; ValueError when they are too many or hold none."""
    if not isinstance(message, bytes) or len(message) > MOST_WHOLE:
        raise ValueError(f"a packed message that is not bytes, or more than {MOST_WHOLE} of them")
    try:
        proto = private("flwr.proto.recorddict_pb2:RecordDict").FromString(message)
        return private("flwr.common.serde:recorddict_from_proto")(proto)
    except (DecodeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"a packed message that Flower cannot read: {reason}") from None


def pack_record(record: ArrayRecord) -> ArrayRecord:
    """One record, packed; the record itself when it has no tensors or too long a header."""
    if not record:
        return record
    table = []
    payloads = []
    for name, array in record.items():
        payload = array.data
        table.append([name, array.dtype, array.shape, array.stype, len(payload)])
        payloads.append(payload)
    header = json.dumps(table, separators=(",", ":")).encode()
    if len(header) > MOST_HEADER:
        return record
    length = len(header).to_bytes(_LENGTH, "little")
    buffer = b"".join([length, header, *payloads])
    return state_to_record({PACKED: np.frombuffer(buffer, np.uint8)})


def unpack_record(record: ArrayRecord) -> ArrayRecord:
    """One record, unpacked; the record itself when it is not packed. ValueError says what is malformed."""
    if set(record) != {PACKED}:
        return record
    packed = record_to_arrays(record)[PACKED]
    if packed.dtype != np.uint8 or packed.ndim != 1:
        form = f"{packed.dtype}{list(packed.shape)}"
        raise ValueError(f"a packed record of type {form}")
    buffer = memoryview(packed)
    table, start = _table(buffer)
    arrays = {}
    for name, dtype, shape, stype, size in table:
        stop = start + size
        arrays[name] = array_of(dtype, tuple(shape), stype, buffer[start:stop])
        start = stop
    return record_of(arrays)


def _table(buffer: memoryview) -> tuple[list, int]:
    """The rows of the header after the checks, and the position where the payloads begin."""
    if len(buffer) < _LENGTH:
        raise ValueError("a packed record without a header")
    length = int.from_bytes(buffer[:_LENGTH], "little")
    place = _LENGTH + length
    if length > MOST_HEADER or place > len(buffer):
        raise ValueError(f"a packed record with a header of {length} bytes")
    header = bytes(buffer[_LENGTH:place])
    try:
        rows = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a packed record with a header that is not JSON ({type(error).__name__})") from None
    try:
        ROWS.validate_python(rows)
    except ValidationError:
        raise ValueError("a packed record with a header that is no list of tensors") from None
    names = {row[0] for row in rows}
    if len(names) != len(rows):
        raise ValueError("a packed record that names a tensor twice")
    announced = sum(row[4] for row in rows)
    there = len(buffer) - place
    if announced != there:
        raise ValueError(f"a packed record with {there} bytes of tensors, but its header says {announced}")
    return rows, place


def _with(content: RecordDict, records: Mapping[str, ArrayRecord]) -> RecordDict:
    """The content with these array records in place of its own; the content itself when they are its own."""
    if all(record is content[name] for name, record in records.items()):
        return content
    replaced = {name: records.get(name, record) for name, record in content.items()}
    return RecordDict(replaced)
