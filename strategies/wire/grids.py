"""Grids around Flower's: one looks for replies often, one asks a site again whose connection broke.

When the connection to a site breaks, the server waits up to `run.patience` seconds and then asks the site again.

A reply that was lost on the way (the connection broke, the site or its client process restarted) does not count as a
failure of the site. The message is sent again, to the node that the client has then. The client repeats the round from
the state in which it began, so the numbers equal those of a run without interruption. The server does not wait in this
way after an error that the client itself reports, after a refused reply, and after a silence of `run.timeout`.
"""

import logging
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any

from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedsim.common.lists import first_few
from fedsim.common.polling import pause
from strategies.wire.exchange import Exchange
from strategies.wire.handshake import Roster
from strategies.wire.matching import LOST
from strategies.wire.packing import packed_message
from strategies.wire.pulling import Puller, is_flowers_own


class WrappedGrid(Grid):
    """A grid around another grid. Subclasses override what they change; all other calls go to the inner grid."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def set_run(self, run: Any) -> None:
        """Flower's hook."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """Flower's run information."""
        return self._grid.run

    def get_node_ids(self) -> Iterable[int]:
        """Ids of the nodes that are online."""
        return self._grid.get_node_ids()

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """A message to a node."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; returns their ids."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies that have arrived."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages; their replies, as they come."""
        return self._grid.send_and_receive(messages, timeout=timeout)


LARGEST_REPLY = 1 << 30  # bytes, where the expected size is not known
KEPT_MESSAGES = 1000  # the largest number of unanswered messages that are remembered
WINDOW = 100  # the largest number of messages of a phase that are sent and not answered


class QuickGrid(WrappedGrid):
    """Flower's own grid, which looks for replies often at first and less often the longer it has waited.

    largest_reply: the size in bytes of the largest reply that is expected; a larger reply becomes an error of its site
    packs: whether messages are packed; a ClientApp that is not fedsim's cannot unpack them
    """

    def __init__(self, grid: Grid, largest_reply: int = LARGEST_REPLY, packs: bool = True) -> None:
        super().__init__(grid)
        self.largest_reply = largest_reply
        self.packs = packs
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
        with packed(messages) if self.packs else nullcontext():
            ids = list(self._grid.push_messages(messages))
        for key, message in zip(ids, messages):
            if key:
                self._sent[key] = message
        oldest = list(self._sent)[:-KEPT_MESSAGES]
        self._forget(oldest)
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
            if fresh:
                waiting |= {key for key in self.push_messages(fresh) if key}
            replies = self.pull_messages(list(waiting)) if waiting else ()
            for reply in replies:
                waiting.discard(reply.metadata.reply_to_message_id)
                if fresh:  # there may be more to send
                    quiet_since = time.monotonic()
                yield reply
                del reply
            now = time.monotonic()
            waited = now - started
            is_late = timeout is not None and waited >= timeout
            if is_late or (not waiting and not fresh):
                break
            if waiting:
                seconds = pause(now - quiet_since)
                if timeout is not None:
                    seconds = min(seconds, timeout - waited)
                time.sleep(seconds)
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


MOST_ATTEMPTS = 5  # for one message; a client whose process ends each time is not asked forever

logger = logging.getLogger("fedsim")


class PatientGrid(WrappedGrid):
    """A grid that sends a message again when its site is back."""

    def __init__(self, grid: Grid, exchange: Exchange, patience: float) -> None:
        super().__init__(grid)
        self._exchange = exchange
        self._patience = patience

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Send messages, pass on replies as they come, and ask once more for lost ones, within `run.patience`."""
        lost = yield from self._sent(messages, timeout)
        deadline = time.monotonic() + self._patience
        attempts = 1
        while lost and attempts < MOST_ATTEMPTS and time.monotonic() < deadline:
            clients = list(lost)
            roster = self._exchange.roster
            if roster is None or not self._back(roster, clients, deadline):
                break
            away = roster.missing(clients)
            again = [self._exchange.again(client) for client in clients if client not in away]
            lost = {client: lost[client] for client in away}
            lost |= yield from self._sent(again, timeout)
            attempts += 1
        yield from lost.values()

    def _sent(self, messages: Iterable[Message], timeout: float | None) -> Generator[Message, None, dict[str, Message]]:
        """Send messages and pass on the replies; returns the errors in place of replies that were lost, by client."""
        lost: dict[str, Message] = {}
        for reply in self._grid.send_and_receive(messages, timeout=timeout):
            client = ""
            if reply.has_error() and reply.error.code in LOST:
                client = self._exchange.awaited(reply)
            if client:
                lost[client] = reply
            else:
                yield reply
            del reply
        return lost

    def _back(self, roster: Roster, clients: list[str], deadline: float) -> bool:
        """Wait until the clients are online, for at most `run.patience`; returns whether at least one is."""
        left = deadline - time.monotonic()
        logger.warning("%s: the connection broke; waiting up to %.0f s for it", first_few(clients), left)
        missing = roster.call(left, clients)
        for client in missing:
            roster.give_up(client)
        return len(missing) < len(clients)
