"""Runs cells in worker processes on this machine. When a worker dies, its cell fails and the worker is replaced."""

import contextlib
import os
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from fedsim.common import fork_server, workers
from fedsim.common.errors import UserError
from fedsim.studies.budget import Reservation
from fedsim.studies.cell_process import END, Message, serve_cells
from fedsim.studies.plan import PRUNED, Cell
from fedsim.studies.waiting import Pool

POLL_SECONDS = 0.5


class CellProcess(workers.ProcessWorker[Cell, Message]):
    """A process of the fork server that runs cells one after the other, with what it may use of the machine."""

    def __init__(self, reservation: Reservation) -> None:
        super().__init__()
        self.reservation = reservation

    def new_process(self, ours: Connection, theirs: Connection) -> BaseProcess:
        # The fork server's own environment is that of its start.
        arguments = (theirs, self.reservation.gpus, dict(os.environ))
        return fork_server.context().Process(target=serve_cells, args=arguments)

    def start(self) -> None:
        """Start the process; UserError when that is not possible."""
        with fork_server.ctrl_c_later():
            try:
                super().start()
            except (OSError, EOFError) as error:
                raise UserError(
                    f"no worker process can be started ({str(error) or type(error).__name__}); it needs free memory "
                    f"and a socket in {tempfile.gettempdir()} (TMPDIR), whose name may have 75 characters"
                ) from error

    def send(self, tasks: Sequence[Cell]) -> None:
        tasks[0].begin()
        with contextlib.suppress(OSError):  # the process has just died, which `results` will notice
            self.link[1].send(tasks[0].experiment.toml())
        self.sent = 1

    def results(self) -> list[Message]:
        """Receive a message about the cell, whose rounds are noted; one that is to be pruned is stopped."""
        cell, message = self.tasks[0], self.message()
        if message[0] != "round":
            return [message]
        if cell.should_prune and cell.should_prune():
            workers.stop([self])
            return [(PRUNED, "", None)]
        cell.note(*message)
        return []

    def failure(self, task: Cell, cause: str) -> Message:
        return "failed", f"the worker process died ({cause})", None

    def ask_to_end(self) -> None:
        """Send the message None to an idle process, and the signal END to a busy one.

        The signal may come at any moment, because a run replaces its files atomically.
        """
        process, pipe = self.link
        if self.sent and process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, END)
        else:
            with contextlib.suppress(OSError):
                pipe.send(None)


class LocalPool(Pool):
    """Worker processes that take cells one after the other."""

    def __init__(self, cells: Sequence[Cell], reservations: Sequence[Reservation]) -> None:
        super().__init__(cells, len(reservations))
        self.workers = [CellProcess(reservation) for reservation in reservations]

    def ready(self, busy: Sequence[CellProcess]) -> list[CellProcess]:
        return workers.ready(busy, POLL_SECONDS)
