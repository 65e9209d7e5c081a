"""The inline runtime for tests: it keeps every message and its reply, and can change replies on purpose."""

from collections.abc import Callable, Iterable

from flwr.app import Error, Message

from fedsim.client_app import app
from fedsim.runtime.inline import InlineGrid
from fedsim.tensors.arrays import record_to_arrays, state_to_record
from fedsim.tensors.records import arrays_of, config_of

Tamper = Callable[[Message, Message], Message]


class WatchedGrid(InlineGrid):
    """Inline grid that keeps every message and its reply in `seen`, and may replace replies."""

    def __init__(self, nodes: int, tamper: Tamper | None = None) -> None:
        super().__init__(app, nodes)
        self.tamper = tamper
        self.seen: list[tuple[Message, Message]] = []

    def deliver(self, messages: list[Message]) -> Iterable[Message]:
        """Deliver the messages; keep and perhaps replace the replies."""
        for message, reply in zip(messages, super().deliver(messages), strict=True):
            final = self.tamper(message, reply) if self.tamper else reply
            self.seen.append((message, final))
            yield final


def trouble(banks: set[str], round: int) -> Tamper:
    """A function that damages replies: one contribution to every bank gets one more dimension, and one client fails."""
    done: set[str | int] = set()

    def tamper(message: Message, reply: Message) -> Message:
        if reply.has_error():
            return reply
        config = config_of(message.content)
        for bank in (banks - done) & set(arrays_of(reply.content)):
            done.add(bank)
            arrays = record_to_arrays(arrays_of(reply.content)[bank])
            reply.content[bank] = state_to_record({name: array[None] for name, array in arrays.items()})
            return reply
        if config["round"] == round and config["phase"] == "train" and round not in done:
            done.add(round)
            return Message(Error(2, "it fails on purpose, for this check"), reply_to=message)
        return reply

    return tamper
