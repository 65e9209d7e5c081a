"""The part of Flower's Grid that our own grids pass on unchanged to the grid that they wrap."""

from collections.abc import Iterable

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedsim.common.values import Foreign


class WrappedGrid(Grid):
    """A grid around another grid. Subclasses override what they change; all other calls go to the inner grid."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def set_run(self, run: Foreign) -> None:
        """Flower's hook."""
        self._grid.set_run(run)

    @property
    def run(self) -> Foreign:
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
