"""When the connection to a site breaks, the server waits up to `run.patience` seconds and then asks the site again.

A reply that was lost on the way (the connection broke, the site or its client process restarted) does not count as a
failure of the site. The message is sent again, to the node that the client has then. The client repeats the round from
the state in which it began, so the numbers equal those of a run without interruption. The server does not wait in this
way after an error that the client itself reports, after a refused reply, and after a silence of `run.timeout`.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from flwr.app import Message
from flwr.serverapp import Grid

from strategies.wire.handshake import Roster
from strategies.wire.wrapped_grid import WrappedGrid

LOST = {3, 4, 5, 8}  # Flower's codes: message, reply or node unavailable, client app stopped responding
MOST_ATTEMPTS = 5  # for one message; a client whose process ends each time is not asked forever

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

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for the replies; a message whose reply is lost is sent again within `run.patience`."""
        messages = list(messages)
        replies = list(self._grid.send_and_receive(messages, timeout=timeout))
        deadline, attempts = time.monotonic() + self._patience, 1
        while self._sender.roster is not None and attempts < MOST_ATTEMPTS:
            lost = self._lost(messages, replies)
            if not lost or time.monotonic() >= deadline or not self._back(list(lost), deadline):
                break
            attempts += 1
            back = {client: message for client, message in lost.items() if not self._missing(client)}
            gone = {message.metadata.message_id for message in back.values()}
            again = [self._sender.again(message) for message in back.values()]
            messages = [message for message in messages if message.metadata.message_id not in gone] + again
            replies = [reply for reply in replies if reply.metadata.reply_to_message_id not in gone]
            replies += list(self._grid.send_and_receive(again, timeout=timeout))
        return replies

    def _lost(self, messages: Sequence[Message], replies: Sequence[Message]) -> dict[str, Message]:
        """Messages whose reply was lost on the way, by client."""
        broken = {
            reply.metadata.reply_to_message_id for reply in replies if reply.has_error() and reply.error.code in LOST
        }
        found = {}
        for message in messages:
            client = self._sender.client_of(message)
            if client and message.metadata.message_id in broken:
                found[client] = message
        return found

    def _back(self, clients: list[str], deadline: float) -> bool:
        """Wait until the clients are online, for at most `run.patience`; returns whether at least one is."""
        left = deadline - time.monotonic()
        logger.warning("%s: the connection broke; waiting up to %.0f s for it", ", ".join(clients), left)
        roster = self._sender.roster
        missing = roster.call(left, clients)
        for client in missing:
            roster.give_up(client)
        return len(missing) < len(clients)

    def _missing(self, client: str) -> bool:
        return bool(self._sender.roster.missing([client]))
