"""When the connection to a site breaks, the server waits up to `run.patience` seconds and then asks the site again.

A reply that was lost on the way (the connection broke, the site or its client process restarted) does not count as a
failure of the site. The message is sent again, to the node that the client has then. The client repeats the round from
the state in which it began, so the numbers equal those of a run without interruption. The server does not wait in this
way after an error that the client itself reports, after a refused reply, and after a silence of `run.timeout`.
"""

import logging
import time
from collections.abc import Generator, Iterable, Iterator
from typing import Protocol

from flwr.app import Message
from flwr.serverapp import Grid

from strategies.wire.handshake import Roster
from strategies.wire.matching import Sent
from strategies.wire.wrapped_grid import WrappedGrid

LOST = {3, 4, 5, 8}  # Flower's codes: message, reply or node unavailable, client app stopped responding
MOST_ATTEMPTS = 5  # for one message; a client whose process ends each time is not asked forever

Broken = dict[str, tuple[Message, Message]]  # a message and the error in place of its reply, by client

logger = logging.getLogger("fedsim")


class Sender(Protocol):
    """An object that knows for which client a message is, and can make the message again."""

    roster: Roster | None

    def client_of(self, message: Message) -> str:
        """Name of the client that a message of this phase is for; empty for one of another phase."""

    def again(self, message: Message) -> Message:
        """The same message for the client's present node; its reply replaces that of the first message."""


class PatientGrid(WrappedGrid):
    """A grid that sends a message again when its site is back."""

    def __init__(self, grid: Grid, sender: Sender, patience: float) -> None:
        super().__init__(grid)
        self._sender, self._patience = sender, patience

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Send messages, pass on replies as they come, and ask once more for lost ones, within `run.patience`."""
        broken = yield from self._sent(messages, timeout)
        deadline, attempts = time.monotonic() + self._patience, 1
        while broken and attempts < MOST_ATTEMPTS and time.monotonic() < deadline:
            roster = self._sender.roster
            if roster is None or not self._back(roster, list(broken), deadline):
                break
            back = [client for client in broken if not roster.missing([client])]
            again = [self._sender.again(broken.pop(client)[0]) for client in back]
            broken |= yield from self._sent(again, timeout)
            attempts += 1
        yield from (reply for _, reply in broken.values())

    def _sent(self, messages: Iterable[Message], timeout: float | None) -> Generator[Message, None, Broken]:
        """Send messages and pass on the replies; returns the messages whose reply was lost on the way."""
        sent, broken = Sent(), {}
        noted = (sent.add(str(place), message) for place, message in enumerate(messages))
        for reply in self._grid.send_and_receive(noted, timeout=timeout):
            matched = sent.match(reply)
            lost = reply.has_error() and reply.error.code in LOST
            client = self._sender.client_of(matched[1]) if matched and lost else ""
            if matched and client:
                broken[client] = matched[1], reply
            else:
                yield reply
            del reply, matched
        return broken

    def _back(self, roster: Roster, clients: list[str], deadline: float) -> bool:
        """Wait until the clients are online, for at most `run.patience`; returns whether at least one is."""
        left = deadline - time.monotonic()
        logger.warning("%s: the connection broke; waiting up to %.0f s for it", ", ".join(clients), left)
        missing = roster.call(left, clients)
        for client in missing:
            roster.give_up(client)
        return len(missing) < len(clients)
