"""When the connection to a site breaks, the server waits up to `run.patience` seconds and then asks the site again.

A reply that was lost on the way (the connection broke, the site or its client process restarted) does not count as a
failure of the site. The message is sent again, to the node that the client has then. The client repeats the round from
the state in which it began, so the numbers equal those of a run without interruption. The server does not wait in this
way after an error that the client itself reports, after a refused reply, and after a silence of `run.timeout`.
"""

import logging
import time
from collections.abc import Generator, Iterable, Iterator

from flwr.app import Message
from flwr.serverapp import Grid

from fedsim.common.lists import first_few
from strategies.wire.exchange import Exchange
from strategies.wire.handshake import Roster
from strategies.wire.matching import LOST
from strategies.wire.wrapped_grid import WrappedGrid

MOST_ATTEMPTS = 5  # for one message; a client whose process ends each time is not asked forever

logger = logging.getLogger("fedsim")


class PatientGrid(WrappedGrid):
    """A grid that sends a message again when its site is back."""

    def __init__(self, grid: Grid, exchange: Exchange, patience: float) -> None:
        super().__init__(grid)
        self._exchange, self._patience = exchange, patience

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Send messages, pass on replies as they come, and ask once more for lost ones, within `run.patience`."""
        lost = yield from self._sent(messages, timeout)
        deadline, attempts = time.monotonic() + self._patience, 1
        while lost and attempts < MOST_ATTEMPTS and time.monotonic() < deadline:
            roster = self._exchange.roster
            if roster is None or not self._back(roster, list(lost), deadline):
                break
            away = roster.missing(list(lost))
            again = [self._exchange.again(client) for client in lost if client not in away]
            lost = {client: lost[client] for client in away}
            lost |= yield from self._sent(again, timeout)
            attempts += 1
        yield from lost.values()

    def _sent(self, messages: Iterable[Message], timeout: float | None) -> Generator[Message, None, dict[str, Message]]:
        """Send messages and pass on the replies; returns the errors in place of replies that were lost, by client."""
        lost: dict[str, Message] = {}
        for reply in self._grid.send_and_receive(messages, timeout=timeout):
            client = self._exchange.awaited(reply) if reply.has_error() and reply.error.code in LOST else ""
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
