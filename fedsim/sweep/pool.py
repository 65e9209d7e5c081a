"""Runs cells in worker processes on this machine. When a worker dies, its cell fails and the worker is replaced."""

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from fedsim.common import fork_server
from fedsim.common.errors import UserError
from fedsim.common.values import Foreign
from fedsim.sweep.budget import Reservation
from fedsim.sweep.cell_process import END, Message, serve_cells
from fedsim.sweep.plan import PRUNED, Cell
from fedsim.sweep.waiting import Pool

STOP_SECONDS = 10.0


@dataclass(eq=False)
class WorkerProcess:
    """One worker process: what it may use of the machine, its connection, and the cell that it runs now."""

    reservation: Reservation
    process: BaseProcess | None = None
    connection: Connection | None = None
    cell: Cell | None = None

    def link(self) -> tuple[BaseProcess, Connection]:
        """The process that has been started, and the connection to it."""
        assert self.process is not None
        assert self.connection is not None
        return self.process, self.connection


class LocalPool(Pool):
    """Worker processes that take cells one after the other."""

    def __init__(self, cells: Sequence[Cell], reservations: Sequence[Reservation]) -> None:
        super().__init__(cells, len(reservations))
        self._workers = [WorkerProcess(reservation) for reservation in reservations]

    def submit(self, cell: Cell) -> WorkerProcess:
        worker = next(worker for worker in self._workers if worker.cell is None)
        give(worker, cell)
        return worker

    def ended(self, tasks: Mapping[WorkerProcess, Cell]) -> Iterator[tuple[WorkerProcess, Message]]:
        busy: dict[Foreign, WorkerProcess] = {worker.link()[1]: worker for worker in tasks}
        for connection in wait(list(busy), timeout=0.5):
            cell, message = hear(busy[connection])
            if message[0] == "round":
                cell.hear(*message)
            else:
                yield busy[connection], message

    def stop(self, tasks: Iterable[WorkerProcess]) -> None:
        stop(self._workers)


def give(worker: WorkerProcess, cell: Cell) -> None:
    """Send a cell to the worker; its process is started first when it is not running."""
    if worker.process is None or not worker.process.is_alive():
        start(worker)
    worker.cell = cell
    cell.begin()
    with contextlib.suppress(OSError):  # the process has just died, which `hear` will notice
        worker.link()[1].send(cell.experiment.toml())


def start(worker: WorkerProcess) -> None:
    """Start the worker's process, which the worker has once it runs; UserError when it cannot be started."""
    context = fork_server.context()
    ours, theirs = context.Pipe()
    # The fork server's own environment is that of its start.
    process = context.Process(target=serve_cells, args=(theirs, worker.reservation.gpus, dict(os.environ)))
    with fork_server.ctrl_c_later():
        try:
            process.start()
        except (OSError, EOFError) as error:
            raise UserError(
                f"no worker process can be started ({str(error) or type(error).__name__}); it needs free memory and a "
                f"socket in {tempfile.gettempdir()} (TMPDIR), whose name may have 75 characters"
            ) from error
        finally:
            theirs.close()
        worker.process, worker.connection = process, ours


def hear(worker: WorkerProcess) -> tuple[Cell, Message]:
    """Receive one message about the worker's cell; the worker is free again when the cell has ended."""
    process, connection = worker.link()
    cell = worker.cell
    assert cell is not None
    try:
        message: Message = connection.recv()
    except (EOFError, OSError):
        process.join(STOP_SECONDS)
        message = ("failed", f"the worker process died ({cause(process.exitcode)})", None)
        connection.close()
        worker.process = None
    if message[0] == "round" and cell.doomed and cell.doomed():
        stop([worker])
        worker.process, message = None, (PRUNED, "", None)
    if message[0] != "round":
        worker.cell = None
    return cell, message


def cause(code: int | None) -> str:
    """A text that explains an exit code. SIGKILL mostly comes from the kernel when memory runs out."""
    if code is None or code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}, out of memory?" if name == "SIGKILL" else name


def stop(workers: Sequence[WorkerProcess]) -> None:
    """End the workers: an idle one gets the message None, a busy one the signal END.

    The signal may come at any moment, because a run replaces its files atomically. Workers that have not ended after
    STOP_SECONDS, which are for all of them together, are killed.
    """
    running = [(*worker.link(), worker.cell is not None) for worker in workers if worker.process is not None]
    for process, connection, busy in running:
        if busy and process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, END)
        else:
            with contextlib.suppress(OSError):
                connection.send(None)
    deadline = time.monotonic() + STOP_SECONDS
    for process, _, _ in running:
        process.join(max(deadline - time.monotonic(), 0.0))
    for process, _, _ in running:
        if process.is_alive():
            process.kill()
    for process, connection, _ in running:
        process.join()
        connection.close()
