"""A grid that looks for replies more often than every three seconds, as Flower does: short rounds need this."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from fedsim.common.polling import pause
from strategies.wire.packing import packed_message
from strategies.wire.pulling import Puller, is_flowers_own
from strategies.wire.wrapped_grid import WrappedGrid

LARGEST_REPLY = 1 << 30  # bytes, where the expected size is not known
KEPT_MESSAGES = 1000  # the largest number of unanswered messages that are remembered
WINDOW = 100  # the largest number of messages of a phase that are sent and not answered


class QuickGrid(WrappedGrid):
    """Flower's own grid, which looks for replies often at first and less often the longer it has waited.

    largest_reply: the size in bytes of the largest reply that is expected; a larger reply becomes an error of its site
    """

    def __init__(self, grid: Grid, largest_reply: int = LARGEST_REPLY) -> None:
        super().__init__(grid)
        self.largest_reply = largest_reply
        self._puller = Puller(grid) if is_flowers_own(grid) else None
        self._sent: dict[str, Message] = {}  # not answered yet

    def expect(self, size: int) -> None:
        """Say before the first reply how many bytes the largest one may have."""
        self.largest_reply = size

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Sends messages; returns their ids."""
        messages = list(messages)
        if not self._puller:
            return list(self._grid.push_messages(messages))
        with packed(messages):
            ids = list(self._grid.push_messages(messages))
        self._sent.update({key: message for key, message in zip(ids, messages) if key})
        self._forget(list(self._sent)[:-KEPT_MESSAGES])
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        """Replies that have arrived."""
        if not self._puller:
            yield from self._grid.pull_messages(message_ids)
            return
        sent = {key: self._sent[key] for key in message_ids if key in self._sent}
        for reply in self._puller.pull(sent, self.largest_reply):
            self._forget([reply.metadata.reply_to_message_id])
            yield reply
            del reply

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Send messages, at most `WINDOW` ahead of their replies, and pass on the replies as they come; those that
        have not come after `timeout` seconds are missing."""
        source = iter(messages)
        waiting: set[str] = set()
        started = quiet_since = time.monotonic()
        while True:
            fresh = list(islice(source, WINDOW - len(waiting)))
            waiting |= {key for key in self.push_messages(fresh) if key} if fresh else set()
            for reply in self.pull_messages(list(waiting)) if waiting else ():
                waiting.discard(reply.metadata.reply_to_message_id)
                quiet_since = time.monotonic() if fresh else quiet_since  # there may be more to send
                yield reply
                del reply
            waited = time.monotonic() - started
            if (not waiting and not fresh) or (timeout is not None and waited >= timeout):
                break
            if waiting:
                seconds = pause(time.monotonic() - quiet_since)
                time.sleep(seconds if timeout is None else min(seconds, timeout - waited))
        self._forget(waiting)

    def _forget(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        for key in keys:
            self._sent.pop(key, None)
        if self._puller:
            self._puller.forget(keys)


@contextmanager
def packed(messages: Sequence[Message]) -> Iterator[None]:
    """Within this block the messages hold packed records; a record that several messages hold is packed once."""
    contents = [message.content for message in messages]
    once: dict[int, ArrayRecord] = {}
    try:
        for message, content in zip(messages, contents, strict=True):
            message.content = packed_message(content, once)
        yield
    finally:
        for message, content in zip(messages, contents, strict=True):
            message.content = content
