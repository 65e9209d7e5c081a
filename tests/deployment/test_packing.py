"""Messages packed into few parts; what is malformed is refused."""

import json

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.task_identity import TaskIdentity

from fedsim.tensors.arrays import record_to_arrays, state_to_record
from strategies.wire import packing
from strategies.wire.grids import packed
from strategies.wire.packing import ANSWER, MOST_HEADER, PACKED, WHOLE, answer, pack, pack_record, unpack, unpack_record

TENSORS = {
    "weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "counter": np.array(7, np.int64),
    "empty": np.zeros((0, 4), np.float32),
    "half": np.array([1.5, np.nan], np.float16),
    "ü[0]": np.asfortranarray(np.arange(12, dtype=np.float64).reshape(3, 4)),
}


def bytes_of(record):
    return {name: (array.dtype, array.shape, array.stype, bytes(array.data)) for name, array in record.items()}


def test_packed_and_unpacked_a_record_is_the_same_without_copies():
    record = state_to_record(TENSORS)
    small = pack_record(record)
    assert list(small) == [PACKED]
    again = unpack_record(small)
    assert list(bytes_of(again).items()) == list(bytes_of(record).items())
    views = record_to_arrays(again)
    assert np.shares_memory(views["weight"], record_to_arrays(small)[PACKED])
    for name, value in TENSORS.items():
        np.testing.assert_array_equal(views[name], value)


def test_no_tensor_and_more_names_than_a_header_may_hold_are_not_packed(monkeypatch):
    monkeypatch.setattr(packing, "MOST_HEADER", 1 << 10)
    many = state_to_record({f"{'n' * 200}{place}": np.zeros(1, np.float32) for place in range(6)})
    for record in (ArrayRecord(), many):
        assert pack_record(record) is record
        assert unpack_record(record) is record
    content = RecordDict({"config": ConfigRecord({"a": 1})})
    assert pack(content) is content
    assert unpack(content) is content


def test_large_messages_take_few_parts_share_the_packed_record_and_ask_for_packed_replies(monkeypatch):
    """Flower uploads one object once; a grid that packs says so in the config, until the messages are sent."""
    monkeypatch.setattr(packing, "MOST_WHOLE", 0)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    record = state_to_record({f"t{place}": np.full(10, place, np.float32) for place in range(100)})
    contents = [RecordDict({"arrays": record, "config": ConfigRecord({"a": 1})}) for _ in range(2)]
    first, second = (Message(content, node, "train") for node, content in zip((7, 8), contents))
    reply, before = RecordDict({"arrays": record}), len(get_all_nested_objects(first))
    older = RecordDict({"config": ConfigRecord({ANSWER: True})})  # of a server that knows another form
    assert answer(first.content, reply) is answer(older, reply) is reply
    with packed([first, second]):
        assert (before, len(get_all_nested_objects(first))) == (204, 6)
        assert first.content.array_records["arrays"] is second.content.array_records["arrays"]
        assert list(answer(first.content, reply).array_records["arrays"]) == [PACKED]
    assert first.content.array_records["arrays"] is record
    assert dict(first.content.config_records["config"]) == {"a": 1}


CONTENT = {
    "arrays": state_to_record(TENSORS),
    "none": ArrayRecord(),
    "metrics": MetricRecord({"loss": 0.1, "examples": 7, "infinite": float("inf"), "many": [1.5, 2.5]}),
    "config": ConfigRecord({"text": "ü", "yes": True, "seven": 7, "raw": b"\x00\xff", "words": ["a", "b"]}),
}


def test_a_small_message_is_one_record_and_comes_back_the_same():
    content = RecordDict(CONTENT)
    small = pack(content)
    assert list(small) == [WHOLE]
    assert len(get_all_nested_objects(Message(small, 7, "train"))) == 3  # message, content, record
    again = unpack(small)
    assert list(again) == list(CONTENT)
    assert list(bytes_of(again["arrays"]).items()) == list(bytes_of(CONTENT["arrays"]).items())
    for name in ("metrics", "config"):
        assert list(again[name].items()) == list(CONTENT[name].items())
        assert list(map(type, again[name].values())) == list(map(type, CONTENT[name].values()))
    assert list(pack(again)) == [WHOLE]  # though its tensors are views now


@pytest.mark.parametrize("more", [{"w": np.zeros(1 << 16, np.float32)}, None])
def test_a_larger_message_keeps_its_records(more):
    """Whether its tensors are too many or its text too long."""
    text = "x" if more else "x" * (1 << 18)
    record = state_to_record(more or TENSORS)
    content = pack(RecordDict({"arrays": record, "config": ConfigRecord({"text": text})}))
    assert list(content) == ["arrays", "config"]
    assert bytes_of(unpack(content)["arrays"]) == bytes_of(record)


def buffer(header, payload=b"", length=None):
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(head) if length is None else length
    return ArrayRecord({PACKED: Array(np.frombuffer(size.to_bytes(8, "little") + head + payload, np.uint8))})


ROW = ["w", "float32", [2], "numpy.ndarray", 8]
MALFORMED = {
    "no header": (ArrayRecord({PACKED: Array(np.zeros(3, np.uint8))}), "without a header"),
    "another type": (ArrayRecord({PACKED: Array(np.zeros(30, np.float32))}), "float32"),
    "header longer than the buffer": (buffer([], length=10**6), "1000000 bytes"),
    "header too long": (buffer(b" " * (MOST_HEADER + 1)), "bytes"),
    "no JSON": (buffer(b"{"), "not JSON"),
    "nested too deep": (buffer(b"[" * 100_000), "not JSON"),
    "row too short": (buffer([ROW[:4]]), "no list"),
    "negative size": (buffer([[*ROW[:4], -8]]), "no list"),
    "size is no integer": (buffer([[*ROW[:4], 8.0]], b"12345678"), "no list"),
    "negative shape": (buffer([["w", "float32", [-2], "numpy.ndarray", 8]], b"12345678"), "no list"),
    "a name twice": (buffer([ROW, ROW], b"1234567812345678"), "twice"),
    "too few bytes": (buffer([ROW], b"1234567"), "7 bytes"),
    "too many bytes": (buffer([ROW], b"123456789"), "9 bytes"),
    "huge size": (buffer([[*ROW[:4], 1 << 61]], b"12345678"), "header says"),
    "text": (ConfigRecord({WHOLE: "text"}), "not bytes"),
    "too many for one record": (ConfigRecord({WHOLE: b"x" * ((1 << 18) + 1)}), "262144"),
    "no protobuf": (ConfigRecord({WHOLE: b"\x0a\xff"}), "cannot read"),
    "a record of no kind": (ConfigRecord({WHOLE: b"\x0a\x03\x0a\x01a"}), "cannot read"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_record_or_message_is_refused(kind):
    record, reason = MALFORMED[kind]
    array = isinstance(record, ArrayRecord)
    with pytest.raises(ValueError, match=reason) as caught:
        unpack(RecordDict({"bank" if array else WHOLE: record}))
    assert ("record 'bank'" in str(caught.value)) == array
    assert "\n" not in str(caught.value)
