"""Records packed into one Array, and replies in parts: what is malformed, too large or unfinished delays nobody."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import array as flowers_arrays
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from fedsim.tensors.arrays import record_to_arrays, state_to_record
from strategies.wire import packing, pulling
from strategies.wire.packing import MOST_HEADER, PACKED, answer, pack, pack_record, unpack, unpack_record
from strategies.wire.polling import QuickGrid, packed

UNIT = 1 << 14  # in the place of a megabyte


class Link(HttpGrid):
    """A SuperLink that holds replies in parts; its grid has the attributes that `Puller` uses."""

    def __init__(self):
        self.node = Node(node_id=1)
        self.replies, self.parts, self.gone, self.fetched, self.confirmed, self.told = {}, {}, set(), 0, [], set()

    @property
    def run(self):
        return SimpleNamespace(run_id=1)

    @property
    def _runtime_client(self):
        return self

    def PullMessages(self, request):  # noqa: N802
        keys = [key for key in request.message_ids if key in self.replies and key not in self.told]
        self.told.update(keys)
        heads = [SimpleNamespace(metadata=self.replies[key].metadata) for key in keys]
        for head, key in zip(heads, keys, strict=True):
            head.metadata.__dict__["_message_id"] = self.replies[key].object_id
        trees = [get_object_tree(self.replies[key]) for key in keys]
        return SimpleNamespace(messages_list=heads, message_object_trees=trees)

    def ConfirmMessageReceived(self, request):  # noqa: N802
        self.confirmed.append(request.message_object_id)

    def push_messages(self, messages):
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = f"m{number}"
        return [message.metadata.message_id for message in messages]

    def answer(self, message, units, missing=0, offset=0):
        return self.send(message, missing, w=np.arange(units * UNIT // 4, dtype=np.float32) + offset)

    def send(self, message, missing=0, **arrays):
        record = ArrayRecord({name: Array(value) for name, value in arrays.items()})
        content = RecordDict({"arrays": record, "config": ConfigRecord({"a": 1})})
        return self.put(message, Message(content, reply_to=message), missing)

    def put(self, message, reply, missing=0):
        self.replies[message.metadata.message_id] = reply
        parts = [(key, value.deflate()) for key, value in get_all_nested_objects(reply).items()]
        keep = len(parts) - missing
        self.parts.update(parts[:keep])
        self.late = dict(parts[keep:])
        return reply


@pytest.fixture
def link(monkeypatch):
    """Parts are of five units, and the replies to questions have four at most."""
    link = Link()

    def fetcher(self):
        def fetch(part):
            if part in link.gone:
                raise ObjectPullError(part, "the session has expired")
            if part not in link.parts:
                raise ObjectUnavailableError(part)
            link.fetched += len(link.parts[part])
            return link.parts[part]

        return fetch

    monkeypatch.setattr(pulling.Puller, "_fetcher", fetcher)
    monkeypatch.setattr(pulling, "SMALL_REPLY", 4 * UNIT)
    monkeypatch.setattr(flowers_arrays, "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", 5 * UNIT)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    return link


@pytest.fixture
def sending(link):
    """sending(most, count, kind) -> (messages that were sent, a function that pulls the replies by message)."""

    def send(most, count=1, kind="train"):
        sent = [Message(RecordDict(), node + 10, kind) for node in range(count)]
        grid = QuickGrid(link, largest_reply=most * UNIT)
        ids = grid.push_messages(sent)
        return sent, lambda: {reply.metadata.reply_to_message_id: reply for reply in grid.pull_messages(ids)}

    return send


def test_a_reply_comes_back_whole_and_the_superlink_is_told(link, sending):
    (message,), pull = sending(20)
    reply = link.answer(message, 12)
    array = pull()["m0"].content.array_records["arrays"]["w"].numpy()
    np.testing.assert_array_equal(array, np.arange(12 * UNIT // 4))
    assert link.confirmed == [reply.object_id]
    (question,), pull = sending(1000, kind="query.handshake")  # whose replies are small, whatever the model's size
    link.told.clear()
    link.answer(question, 8)
    assert pull()["m0"].has_error()


def first_part_missing(link, message):
    """The gate stops a site that sends too much: what came before shows it, wherever the missing part belongs."""
    link.parts.pop(next(iterate_object_tree(get_object_tree(link.answer(message, 40)))).object_id)


def one_part_many_times(link, message):
    """Zeros are sent once, but nine arrays of 12 units would be assembled from the same parts."""
    link.send(message, **{str(number): np.zeros(3 * UNIT + number, np.float32) for number in range(9)})


@pytest.mark.parametrize(("most", "send", "fetched"), [
    (11, lambda link, message: link.answer(message, 40), 11 + 6),  # the part that was too much is one of five units
    (11, first_part_missing, 50),
    (100, one_part_many_times, 71),
])  # fmt: skip
def test_a_reply_that_is_too_large_is_given_up_early_and_affects_no_other(link, sending, most, send, fetched):
    (large, good), pull = sending(most, 2)
    send(link, large)
    link.answer(good, 8, offset=0.5)
    replies = pull()
    assert f"larger than the {most * UNIT} bytes" in replies["m0"].error.reason
    assert replies["m0"].metadata.src_node_id == 10
    assert replies["m1"].has_content()
    assert link.fetched < (fetched + 9) * UNIT
    assert len(link.confirmed) == 2


def test_an_unfinished_reply_holds_up_nobody_and_no_part_is_fetched_twice(link, sending):
    (unfinished, whole), pull = sending(20, 2)
    link.answer(whole, 1)
    link.answer(unfinished, 12, missing=1)
    late = link.late
    assert pull().keys() == {"m1"}
    before = link.fetched
    assert pull() == {}
    assert link.fetched == before
    link.parts.update(late)
    assert pull()["m0"].has_content()


def test_a_reply_whose_parts_are_gone_is_an_error(link, sending):
    """Its sender stopped half-way and Flower has closed its session."""
    (message,), pull = sending(20)
    link.answer(message, 12, missing=1)
    assert pull() == {}
    link.gone.update(link.late)
    error = pull()["m0"].error
    assert error.code == 4
    assert "did not arrive whole" in error.reason


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
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_record_is_refused(kind):
    record, reason = MALFORMED[kind]
    with pytest.raises(ValueError, match=reason) as caught:
        unpack(RecordDict({"bank": record}))
    assert "record 'bank'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_grid_packs_what_it_sends_and_unpacks_replies(link, monkeypatch):
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
