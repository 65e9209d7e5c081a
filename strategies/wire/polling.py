"""A grid that looks for replies more often than Flower's every three seconds: rounds of small models are short."""

import time
from collections.abc import Iterable
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

FIRST_SECONDS, LAST_SECONDS = 1.0, 3.0  # between two looks; each is a write to the SuperLink's database
SHARE = 20  # a look is late by at most this fraction of the wait


class QuickGrid(Grid):
    """Flower's own grid, asked for replies often at first, and the less often the longer the wait has been."""

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
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; their ids."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies that have arrived."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for all replies, or what has come after `timeout` seconds."""
        messages = list(messages)
        waiting = {key for key in self.push_messages(messages) if key} if messages else set()
        started = time.monotonic()
        replies: list[Message] = []
        while waiting:
            arrived = list(self.pull_messages(list(waiting)))
            replies += arrived
            waiting -= {reply.metadata.reply_to_message_id for reply in arrived}
            waited = time.monotonic() - started
            if not waiting or (timeout is not None and waited >= timeout):
                break
            pause = min(max(FIRST_SECONDS, waited / SHARE), LAST_SECONDS)
            time.sleep(pause if timeout is None else min(pause, timeout - waited))
        return replies
