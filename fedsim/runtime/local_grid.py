"""What every runtime of a simulation is, a Grid of Flower over its clients, and the simplest: the inline runtime."""

import itertools
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedsim.common.errors import CLIENT_APP_RAISED
from fedsim.flower.identity import assume_identity, stamp
from fedsim.records.callbacks import RunCallback

RUN_ID = 1


class LocalGrid(Grid):
    """Flower's Grid for the clients of a simulation, in this process or in workers that the grid starts.

    A runtime is a subclass. It either defines `deliver`, whose replies come in the order of the messages, or the three
    methods with which Flower exchanges messages: `push_messages`, `pull_messages` and `send_and_receive` (RayGrid).
    What holds for all of them:

    - Each message goes to the client app with the context of its node. The app finds in `node_config` which of the
      clients it may be: `partition-id` and `num-partitions`.
    - There is at most one reply to a message. It answers the message's id, and may come in any order.
    - `send_and_receive` takes a message when it can send it, because each is made when it is taken. Few replies wait
      in memory. Replies that are not there after `timeout` seconds are left out, where work can be given up.
    - An exception of the app, or a worker that dies, is an error reply of its client.
    - `close` ends all that the grid has started; it may be called twice.
    """

    at_once: int = 1  # messages that are delivered together

    def __init__(self, nodes: int) -> None:
        self._run = assume_identity(RUN_ID)
        self._ids = itertools.count(1)
        self._replies: dict[str, Message] = {}
        self.node_ids = list(range(2, nodes + 2))  # node 1 is the server
        self.contexts = {
            node: Context(RUN_ID, node, {"partition-id": index, "num-partitions": nodes}, RecordDict(), {})
            for index, node in enumerate(self.node_ids)
        }

    def deliver(self, messages: list[Message]) -> Iterable[Message]:
        """The clients' replies, one per message, in the order of the messages."""
        raise NotImplementedError

    def set_run(self, run: Any) -> None:
        """Flower calls this; it does nothing, because the run is known since the construction."""
        self._run = run

    @property
    def run(self) -> Any:
        """Flower's run information."""
        return self._run

    def get_node_ids(self) -> list[int]:
        """Ids of the clients' nodes."""
        return self.node_ids

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """A message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Deliver messages; returns their ids."""
        messages = list(self._stamped(messages))
        ids = [message.metadata.message_id for message in messages]
        self._replies.update(zip(ids, self.deliver(messages), strict=True))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies that have arrived since the last call."""
        return [self._replies.pop(key) for key in message_ids if key in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Deliver `at_once` messages at a time and yield their replies, so that few replies are in memory."""
        source = self._stamped(messages)
        while group := list(islice(source, self.at_once)):
            for reply in self.deliver(group):
                yield reply
                del reply

    def _stamped(self, messages: Iterable[Message]) -> Iterator[Message]:
        """The messages, each with an id of its own."""
        for message in messages:
            stamp(message, f"m{next(self._ids)}")
            yield message

    def nodes_of_processes(self) -> list[int]:
        """As many nodes as processes that can share an evaluation, so that each gets one of as many messages."""
        return []

    def run_callbacks(self) -> list[RunCallback]:
        """What the grid wants to be told of the run."""
        return []

    def close(self) -> None:
        """Release the resources of this runtime."""


class InlineGrid(LocalGrid):
    """The inline runtime: runs the client app in this process, where data, model and optimizer stay in memory."""

    def __init__(self, app: ClientApp, nodes: int) -> None:
        super().__init__(nodes)
        self._app = app

    def deliver(self, messages: list[Message]) -> Iterable[Message]:
        """Run one client after the other, in the order of the messages."""
        return map(self._answer, messages)

    def _answer(self, message: Message) -> Message:
        """The app's reply; an exception of an app that does not catch its own is an error reply, as in Flower."""
        try:
            return self._app(message, self.contexts[message.metadata.dst_node_id])
        except Exception as error:
            reason = f"{type(error)}:<'{error}'>"
            return Message(Error(CLIENT_APP_RAISED, reason), reply_to=message)
