"""Replies in parts: too large replies are dropped before they are assembled; unfinished ones do not delay others."""

from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from strategies.wire import pulling
from strategies.wire.polling import QuickGrid

MEGABYTE = 1 << 20


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

    def answer(self, message, megabytes, missing=0, offset=0):
        arrays = {"w": Array(np.arange(megabytes * MEGABYTE // 4, dtype=np.float32) + offset)}
        reply = Message(RecordDict({"arrays": ArrayRecord(arrays), "config": ConfigRecord({"a": 1})}), reply_to=message)
        return self.put(message, reply, missing)

    def put(self, message, reply, missing=0):
        self.replies[message.metadata.message_id] = reply
        parts = {key: value.deflate() for key, value in get_all_nested_objects(reply).items()}
        keep = len(parts) - missing
        self.parts.update(dict(list(parts.items())[:keep]))
        self.late = dict(list(parts.items())[keep:])
        return reply


@pytest.fixture
def link(monkeypatch):
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
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    return link


def messages(count=2, kind="train"):
    return [Message(RecordDict(), node + 10, kind) for node in range(count)]


def test_a_reply_comes_back_whole(link):
    """All bytes are equal, and the SuperLink is informed."""
    sent = messages(1)
    grid = QuickGrid(link, largest_reply=20 * MEGABYTE)
    ids = grid.push_messages(sent)
    reply = link.answer(sent[0], 12)
    (found,) = grid.pull_messages(ids)
    array = found.content.array_records["arrays"]["w"].numpy()
    assert array.shape == (3 * MEGABYTE,)
    assert (array == np.arange(array.size)).all()
    assert link.confirmed == [reply.object_id]


def test_a_reply_that_is_too_large_is_given_up_early(link):
    """Of 40 MB only the allowed part is fetched, and the other site's reply is not affected."""
    sent = messages(2)
    grid = QuickGrid(link, largest_reply=11 * MEGABYTE)
    ids = grid.push_messages(sent)
    link.answer(sent[0], 40)
    link.answer(sent[1], 8, offset=0.5)
    replies = {reply.metadata.reply_to_message_id: reply for reply in grid.pull_messages(ids)}
    assert replies["m0"].has_error()
    assert "larger than the 11534336 bytes" in replies["m0"].error.reason
    assert replies["m0"].metadata.src_node_id == 10
    assert replies["m1"].has_content()
    assert link.fetched < (11 + 6 + 9) * MEGABYTE  # the part that was too much is one of 5 MiB
    assert len(link.confirmed) == 2


def test_a_reply_is_too_large_even_when_its_first_part_never_comes(link):
    """The gate stops a site that sends too much: what came before shows it, wherever the missing part belongs."""
    sent = messages(1)
    grid = QuickGrid(link, largest_reply=11 * MEGABYTE)
    ids = grid.push_messages(sent)
    tree = get_object_tree(link.answer(sent[0], 40))
    link.parts.pop(next(iterate_object_tree(tree)).object_id)
    (reply,) = grid.pull_messages(ids)
    assert "larger than the 11534336 bytes" in reply.error.reason


def test_a_part_named_many_times_is_counted_each_time(link):
    """Zeros are sent once, but nine arrays of 12 MB would be assembled from the same parts."""
    sent = messages(2)
    grid = QuickGrid(link, largest_reply=100 * MEGABYTE)
    ids = grid.push_messages(sent)
    zeros = {str(number): Array(np.zeros(3 * MEGABYTE + number, np.float32)) for number in range(9)}
    link.put(sent[0], Message(RecordDict({"arrays": ArrayRecord(zeros)}), reply_to=sent[0]))
    link.answer(sent[1], 1)
    replies = {reply.metadata.reply_to_message_id: reply for reply in grid.pull_messages(ids)}
    assert "larger than the 104857600 bytes" in replies["m0"].error.reason
    assert replies["m1"].has_content()
    assert link.fetched < 80 * MEGABYTE


def test_a_reply_of_a_question_is_small(link):
    """The answer to a handshake or validation has a small limit, whatever the size of the model."""
    sent = messages(1, "query.handshake")
    grid = QuickGrid(link, largest_reply=1000 * MEGABYTE)
    ids = grid.push_messages(sent)
    link.answer(sent[0], 8)
    (reply,) = grid.pull_messages(ids)
    assert reply.has_error()


def test_an_unfinished_reply_holds_up_nobody(link):
    """It is checked again later; parts that have arrived are not fetched a second time."""
    sent = messages(2)
    grid = QuickGrid(link, largest_reply=20 * MEGABYTE)
    ids = grid.push_messages(sent)
    link.answer(sent[1], 1)
    link.answer(sent[0], 12, missing=1)
    late = link.late
    (first,) = grid.pull_messages(ids)
    assert first.metadata.reply_to_message_id == "m1"
    before = link.fetched
    assert list(grid.pull_messages(["m0"])) == []
    assert link.fetched == before
    link.parts.update(late)
    (second,) = grid.pull_messages(["m0"])
    assert second.has_content()


def test_a_reply_whose_parts_are_gone_is_an_error(link):
    """Its sender stopped half-way and Flower has closed its session."""
    sent = messages(1)
    grid = QuickGrid(link, largest_reply=20 * MEGABYTE)
    ids = grid.push_messages(sent)
    link.answer(sent[0], 12, missing=1)
    assert list(grid.pull_messages(ids)) == []
    link.gone.update(link.late)
    (reply,) = grid.pull_messages(ids)
    assert reply.error.code == 4
    assert "did not arrive whole" in reply.error.reason
