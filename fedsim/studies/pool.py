"""Who runs the cells of a sweep: the pool of workers, of which the simplest are processes of this machine.

Other sweeps on the same folder may run some of the cells. When a worker dies, its cell fails and the worker is
replaced.
"""

import contextlib
import os
import tempfile
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from fedsim.common import fork_server
from fedsim.common.errors import UserError
from fedsim.common.workers import ProcessWorker, Worker, ready, stop
from fedsim.records.record_files import is_finished
from fedsim.runs import admission
from fedsim.runs.claim import is_claimed
from fedsim.runs.longer import goes_on
from fedsim.runs.plan import resolve
from fedsim.studies.budget import Reservation
from fedsim.studies.cell_process import END, Message, serve_cells
from fedsim.studies.plan import PRUNED, Cell, refusal_of
from fedsim.studies.view import SweepView

LOOK_SECONDS = 1.0  # between two looks at cells that others hold
POLL_SECONDS = 0.5


class Waiting:
    """Gives the cells in their order. One that another process has claimed goes to the end, and is looked at again
    until that process has finished it, or has left it."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._cells = deque(cells)
        self._next_look = 0.0

    def __bool__(self) -> bool:
        return bool(self._cells)

    def take(self) -> Cell | None:
        """The next cell that nobody holds; None while there is none."""
        if time.monotonic() < self._next_look:
            return None
        for _ in range(len(self._cells)):
            cell = self._cells.popleft()
            if is_claimed(cell.folder):
                self._pass_over(cell)
            elif is_finished(cell.folder) and not goes_on(cell.folder, cell.experiment):
                cell.note(*_verdict(cell))
            elif cell.should_prune and cell.should_prune():  # another process has left it for that
                cell.note(PRUNED, "", None)
            else:
                return cell
        self._next_look = time.monotonic() + LOOK_SECONDS
        return None

    def note(self, cell: Cell, message: Message) -> None:
        """Note a message about a cell that was taken; one that another process has claimed before comes back."""
        if message[0] == "claimed":
            self._pass_over(cell)
        else:
            cell.note(*message)

    def _pass_over(self, cell: Cell) -> None:
        cell.state = "elsewhere"
        self._cells.append(cell)


def _verdict(cell: Cell) -> Message:
    """The message that another process's finished run deserves: it may be one with other settings."""
    reason = refusal_of(lambda: admission.check_folder(resolve(cell.experiment)))
    return "failed" if reason else "finished", reason, None


class Pool(AbstractContextManager):
    """Runs cells on workers of a machine or a cluster, which may be found or started on entry."""

    def __init__(self, cells: Sequence[Cell], jobs: int) -> None:
        self.cells, self.jobs = list(cells), jobs or len(cells)
        self.workers: list[Any] = []

    def __exit__(self, *error: object) -> None:
        return

    @property
    def width(self) -> int:
        """The number of cells that run at the same time, as far as it is known."""
        return min(self.jobs, len(self.cells))

    @abstractmethod
    def ready(self, busy: Sequence[Any]) -> Iterable[Worker[Cell, Message]]:
        """Wait a moment, and note the progress of the cells; returns the workers from which something has come."""

    def run(self, view: SweepView) -> None:
        """Run all cells. A cell whose worker dies is reported as failed; after Ctrl-C every cell can be resumed."""
        waiting = Waiting(self.cells)
        try:
            while waiting or any(worker.tasks for worker in self.workers):
                self._hand_out(waiting)
                for worker in self.ready([worker for worker in self.workers if worker.tasks]):
                    for cell, message in worker.receive():
                        waiting.note(cell, message)
                view.update()
        finally:
            stop(self.workers)

    def _hand_out(self, waiting: Waiting) -> None:
        for worker in self.workers:
            if not worker.tasks:
                cell = waiting.take()
                if cell is None:
                    return
                worker.give(cell)


class CellProcess(ProcessWorker[Cell, Message]):
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
            stop([self])
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
        return ready(busy, POLL_SECONDS)
