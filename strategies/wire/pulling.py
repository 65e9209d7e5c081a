"""Fetches replies part by part, and refuses a reply that is larger than expected before its parts are joined.

Flower's grid fetches all parts of a reply into memory, however many there are. It waits for parts that never come (two
hours), and the replies of other sites wait meanwhile. Here an incomplete reply is looked at again later, and a
reply that has become too large turns into an error of its site.

What is used of Flower and not public is in fedsim/flower/private.py.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Error, Message

from fedsim.flower.identity import stamp
from fedsim.flower.private import private
from strategies.wire.packing import unpack

OBJECTS = "flwr.supercore.inflatable.inflatable_"
SMALL_REPLY = 4 << 20  # bytes of a reply that holds no tensors of the model: handshakes, validations
BANK_BYTES = 256 << 20  # for a reply's contributions to banks, because their size is not known beforehand
UNKNOWN, UNAVAILABLE = 0, 4  # Flower's codes of errors
TOO_LARGE = "its reply is larger than the {} bytes that were expected, and was refused before it was read"
PARTS_AT_ONCE = 4096  # parts of one reply that are fetched before those of the next reply
MISSING_AT_ONCE = 8  # missing parts of one reply that are asked for before those of the next reply


class Grown(Exception):  # noqa: N818
    """A reply is larger than allowed."""


@dataclass
class Arriving:
    """A reply some of whose parts have arrived."""

    message_id: str
    waiting: list[str]  # ids of parts
    most: int
    parts: dict[str, bytes] = field(default_factory=dict)
    size: int = 0

    def add(self, part: str, content: bytes) -> None:
        """Adds one more part. Raises Grown when the reply is too large."""
        self.size += len(content)
        if self.size > self.most:
            raise Grown(TOO_LARGE.format(self.most))
        self.parts[part] = content


def unpacked_bytes(parts: Mapping[str, bytes]) -> int:
    """The size of all arrays when they are put together; an array may name the same part a thousand times."""
    read_head = private(f"{OBJECTS}object:get_object_head_values_from_object_content")
    read_body = private(f"{OBJECTS}object:get_object_body")
    array = private("flwr.app.message:Array")
    total = 0
    for content in parts.values():
        kind, children, _ = read_head(content)
        if kind != array.__qualname__:
            continue
        body = json.loads(read_body(content, array))
        for index in body["arraychunk_ids"]:
            chunk = parts[children[index]]
            total += len(chunk)
    return total


def expected_bytes(sizes: Iterable[int], banks: bool) -> int:
    """The largest size of a reply with a model: its tensors and a tenth more, and room for banks if there are any."""
    size = int(1.1 * sum(sizes)) + SMALL_REPLY
    if banks:
        size += BANK_BYTES
    return size


def most_bytes(message: Message, largest: int) -> int:
    """The largest size of the reply to a message; `largest` is that of a reply with the model's tensors."""
    kinds = message.metadata.message_type.split(".")
    has_tensors = kinds[0] == "train" or kinds[-1] in ("collect", "visit")
    return largest if has_tensors else SMALL_REPLY


class Puller:
    """Fetches the replies of Flower's own grid."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self._arriving: dict[str, Arriving] = {}  # by the id of the message that it answers

    def pull(self, sent: Mapping[str, Message], largest: int) -> Iterator[Message]:
        """Replies to the sent messages {id: message} that are complete, and errors for those that never will be.

        Replies are fetched one after the other, as long as their parts are there, so that few replies are in memory at
        once. After `PARTS_AT_ONCE` parts the next reply gets its turn, so that a reply with very many small parts does
        not delay the others.
        """
        fresh = [key for key in sent if key not in self._arriving]
        for key, message_id, parts in self._new(fresh):
            if key in sent:
                most = most_bytes(sent[key], largest)
                self._arriving[key] = Arriving(message_id, parts, most)
        moving = [key for key in self._arriving if key in sent]
        while moving:
            for key in list(moving):
                waiting = self._arriving[key].waiting
                left = len(waiting)
                reply = self._advance(self._arriving[key], sent[key])
                if reply is not None or len(waiting) == left:
                    moving.remove(key)
                if reply is not None:
                    del self._arriving[key]
                    yield reply
                del reply

    def forget(self, keys: Iterable[str]) -> None:
        """Stops fetching the replies to these messages, for which no caller waits any more."""
        for key in keys:
            self._arriving.pop(key, None)

    def _new(self, keys: list[str]) -> list[tuple[str, str, list[str]]]:
        """The replies that have come to these messages: (id of the message, id of the reply, ids of its parts)."""
        if not keys:
            return []
        request = private("flwr.proto.runtime_pb2:PullAppMessagesRequest")(message_ids=keys)
        response = self._grid._runtime_client.PullMessages(request)
        objects_of = private(f"{OBJECTS}object:iterate_object_tree")
        replies = []
        for proto, tree in zip(response.messages_list, response.message_object_trees, strict=True):
            metadata = proto.metadata
            parts = dict.fromkeys(part.object_id for part in objects_of(tree))
            replies.append((metadata.reply_to_message_id, metadata.message_id, list(parts)))
        return replies

    def _advance(self, reply: Arriving, message: Message) -> Message | None:
        """Fetches the parts that are there; returns the complete reply, an error, or None while parts are missing."""
        lost = private(f"{OBJECTS}utils:ObjectPullError")
        late = private(f"{OBJECTS}utils:ObjectUnavailableError")
        fetch = self._fetcher()
        missing = 0
        try:
            for _ in range(min(PARTS_AT_ONCE, len(reply.waiting))):
                part = reply.waiting[0]
                try:
                    reply.add(part, fetch(part))
                    reply.waiting.pop(0)
                except late:  # later parts may be there, and show that the reply is too large
                    reply.waiting.append(reply.waiting.pop(0))
                    missing += 1
                    if missing == MISSING_AT_ONCE:
                        return None
        except Grown as error:
            return self._instead(reply, message, Error(UNKNOWN, str(error)))
        except lost as error:
            reason = f"its reply did not arrive whole ({len(reply.waiting)} parts are missing): {error}"
            return self._instead(reply, message, Error(UNAVAILABLE, reason))
        if reply.waiting:
            return None
        return self._whole(reply, message)

    def _whole(self, reply: Arriving, message: Message) -> Message:
        """The reply, whose parts are all there, or an error where it cannot be read or is too large."""
        self._confirm(reply)
        try:
            if unpacked_bytes(reply.parts) > reply.most:
                too_large = TOO_LARGE.format(reply.most)
                return Message(Error(UNKNOWN, too_large), reply_to=message)
            inflate = private(f"{OBJECTS}utils:inflate_object_from_contents")
            inflated = inflate(reply.message_id, reply.parts)
            if inflated.has_content():
                inflated.content = unpack(inflated.content)
        except Exception as error:  # a site may send anything as a reply
            reason = f"its reply cannot be read: {type(error).__name__}: {error}"
            return Message(Error(UNKNOWN, reason), reply_to=message)
        stamp(inflated, reply.message_id)
        return inflated

    def _instead(self, reply: Arriving, message: Message, error: Error) -> Message:
        self._confirm(reply)
        return Message(error, reply_to=message)

    def _confirm(self, reply: Arriving) -> None:
        """Tells the SuperLink that it may remove the reply."""
        request = private("flwr.proto.message_pb2:ConfirmMessageReceivedRequest")
        run = self._grid.run.run_id
        confirmation = request(node=self._grid.node, run_id=run, message_object_id=reply.message_id)
        self._grid._runtime_client.ConfirmMessageReceived(confirmation)

    def _fetcher(self) -> Callable[[str], bytes]:
        """A function that fetches one part by its id."""
        make = private(f"{OBJECTS}protobuf_utils:make_pull_object_fn_protobuf")
        pull_object = self._grid._runtime_client.PullObject
        return make(pull_object, self._grid.node, self._grid.run.run_id)


def is_flowers_own(grid: Any) -> bool:
    """Whether this is the grid of a SuperLink, where replies come in parts."""
    return isinstance(grid, private("flwr.superlink.grid.http_grid:HttpGrid"))
