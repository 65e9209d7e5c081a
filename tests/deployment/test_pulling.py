"""Replies in parts: what is malformed, too large or unfinished delays nobody."""

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

from fedsim.tensors.arrays import state_to_record
from strategies.wire import pulling
from strategies.wire.grids import QuickGrid
from strategies.wire.packing import WHOLE, pack

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


def test_the_grid_packs_what_it_sends_and_unpacks_replies(link, monkeypatch):
    """The messages hold their own records again afterwards; a malformed reply is its site's error."""
    record = state_to_record({"w": np.arange(3, dtype=np.float32), "n": np.array(7)})
    sent = [Message(RecordDict({"arrays": record}), node, "train") for node in (10, 11)]
    grid, seen, push = QuickGrid(link), [], link.push_messages

    def spy(messages):
        seen.extend(list(message.content) for message in messages)
        return push(messages)

    monkeypatch.setattr(link, "push_messages", spy)
    ids = grid.push_messages(sent)
    assert seen == [[WHOLE], [WHOLE]]
    assert sent[0].content["arrays"] is record
    link.put(sent[0], Message(pack(RecordDict({"arrays": record})), reply_to=sent[0]))
    link.put(sent[1], Message(RecordDict({WHOLE: ConfigRecord({WHOLE: b"\x0a\xff"})}), reply_to=sent[1]))
    replies = {reply.metadata.reply_to_message_id: reply for reply in grid.pull_messages(ids)}
    assert replies["m0"].content["arrays"]["w"].numpy().tolist() == [0, 1, 2]
    assert "its reply cannot be read" in replies["m1"].error.reason
