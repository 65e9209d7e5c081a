"""Records packed into one Array: unpacking restores them, messages have few parts, malformed ones are refused."""

import json

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.task_identity import TaskIdentity
from test_pulling import link  # noqa: F401

from fedsim.tensors.arrays import record_to_arrays, state_to_record
from strategies.wire import packing
from strategies.wire.packing import MOST_HEADER, PACKED, answer, pack, pack_record, unpack, unpack_record
from strategies.wire.polling import QuickGrid, packed

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


def test_one_tensor_no_tensor_and_more_names_than_a_header_may_hold_are_not_packed(monkeypatch):
    monkeypatch.setattr(packing, "MOST_HEADER", 1 << 10)
    many = state_to_record({f"{'n' * 200}{place}": np.zeros(1, np.float32) for place in range(6)})
    for record in (ArrayRecord(), state_to_record({"w": TENSORS["weight"]}), many):
        assert pack_record(record) is record
        assert unpack_record(record) is record
    content = RecordDict({"config": ConfigRecord({"a": 1})})
    assert pack(content) is content
    assert unpack(content) is content


def test_messages_take_few_parts_share_the_packed_record_and_ask_for_packed_replies():
    """Flower uploads one object once; a grid that packs says so in the config, until the messages are sent."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    record = state_to_record({f"t{place}": np.full(10, place, np.float32) for place in range(100)})
    contents = [RecordDict({"arrays": record, "config": ConfigRecord({"a": 1})}) for _ in range(2)]
    first, second = (Message(content, node, "train") for node, content in zip((7, 8), contents))
    reply, before = RecordDict({"arrays": record}), len(get_all_nested_objects(first))
    assert answer(first.content, reply) is reply
    with packed([first, second]):
        assert (before, len(get_all_nested_objects(first))) == (204, 6)
        assert first.content.array_records["arrays"] is second.content.array_records["arrays"]
        assert list(answer(first.content, reply).array_records["arrays"]) == [PACKED]
    assert first.content.array_records["arrays"] is record
    assert dict(first.content.config_records["config"]) == {"a": 1}


def buffer(header, payload=b"", length=None):
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(head) if length is None else length
    return ArrayRecord({PACKED: Array(np.frombuffer(size.to_bytes(8, "little") + head + payload, np.uint8))})


ROW = ["w", "float32", [2], "numpy.ndarray", 8]
MALFORMED = {
    "no header": (ArrayRecord({PACKED: Array(np.zeros(3, np.uint8))}), "without a header"),
    "another type": (ArrayRecord({PACKED: Array(np.zeros(30, np.float32))}), "float32"),
    "another rank": (ArrayRecord({PACKED: Array(np.zeros((3, 30), np.uint8))}), "3, 30"),
    "header longer than the buffer": (buffer([], length=10**6), "1000000 bytes"),
    "header too long": (buffer(b" " * (MOST_HEADER + 1)), "bytes"),
    "no JSON": (buffer(b"{"), "not JSON"),
    "no UTF-8": (buffer(b"\xff\xfe\xff"), "not JSON"),
    "nested too deep": (buffer(b"[" * 100_000), "not JSON"),
    "no list": (buffer({"w": 1}), "no list"),
    "row too short": (buffer([ROW[:4]]), "no list"),
    "negative size": (buffer([[*ROW[:4], -8]]), "no list"),
    "size is no integer": (buffer([[*ROW[:4], 8.0]], b"12345678"), "no list"),
    "size is true": (buffer([[*ROW[:4], True]], b"1"), "no list"),
    "negative shape": (buffer([["w", "float32", [-2], "numpy.ndarray", 8]], b"12345678"), "no list"),
    "a name twice": (buffer([ROW, ROW], b"1234567812345678"), "twice"),
    "too few bytes": (buffer([ROW], b"1234567"), "7 bytes"),
    "too many bytes": (buffer([ROW], b"123456789"), "9 bytes"),
    "huge size": (buffer([[*ROW[:4], 1 << 61]], b"12345678"), "header says"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_record_is_refused(kind):
    record, reason = MALFORMED[kind]
    with pytest.raises(ValueError, match=reason) as caught:
        unpack(RecordDict({"bank": record}))
    assert "record 'bank'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_tensors_themselves_are_checked_as_always():
    with pytest.raises(ValueError, match="'w'"):
        record_to_arrays(unpack_record(buffer([ROW], b"12345678")))


def test_the_grid_packs_what_it_sends_and_unpacks_replies(link, monkeypatch):  # noqa: F811
    """The messages hold their own records again afterwards; a malformed reply is its site's error."""
    sent = [Message(RecordDict({"arrays": state_to_record(TENSORS)}), node, "train") for node in (10, 11)]
    grid, seen, push = QuickGrid(link), [], link.push_messages

    def spy(messages):
        seen.extend(list(message.content.array_records["arrays"]) for message in messages)
        return push(messages)

    monkeypatch.setattr(link, "push_messages", spy)
    ids = grid.push_messages(sent)
    assert seen == [[PACKED], [PACKED]]
    assert list(sent[0].content.array_records["arrays"]) == list(TENSORS)
    link.put(sent[0], Message(pack(RecordDict({"arrays": state_to_record(TENSORS)})), reply_to=sent[0]))
    link.put(sent[1], Message(RecordDict({"arrays": buffer([ROW], b"123")}), reply_to=sent[1]))
    replies = {reply.metadata.reply_to_message_id: reply for reply in grid.pull_messages(ids)}
    assert bytes_of(replies["m0"].content.array_records["arrays"]) == bytes_of(state_to_record(TENSORS))
    assert "its reply cannot be read" in replies["m1"].error.reason
