"""The inline runtime: all clients in this process, one after the other; needs no Ray."""

from collections.abc import Iterable

from flwr.app import Error, Message
from flwr.clientapp import ClientApp

from fedsim.common.errors import CLIENT_APP_RAISED
from fedsim.runtime.local_grid import LocalGrid


class InlineGrid(LocalGrid):
    """Runs the client app in this process; data, model and optimizer stay in memory."""

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
