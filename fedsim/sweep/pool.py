"""Cells as processes on this machine: each slot has one worker; a worker that dies fails its cell and is replaced."""

import contextlib
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from fedsim.sweep.budget import Slot
from fedsim.sweep.plan import Cell
from fedsim.sweep.view import SweepView
from fedsim.sweep.worker import END, worker

STOP_SECONDS = 10.0


@dataclass
class Seat:
    """A slot with its worker, and the cell that the worker is at."""

    slot: Slot
    process: BaseProcess | None = None
    connection: Connection | None = None
    cell: Cell | None = None


class LocalPool:
    """Worker processes that take cells one after the other."""

    def __init__(self, cells: Sequence[Cell], slots: Sequence[Slot]) -> None:
        self._queue = deque(cells)
        self._seats = [Seat(slot) for slot in slots]

    def run(self, view: SweepView) -> None:
        """Run all cells; Ctrl-C ends the workers and leaves every cell resumable."""
        try:
            while self._queue or self._busy():
                for seat in self._seats:
                    if self._queue and seat.cell is None:
                        give(seat, self._queue.popleft())
                busy = self._busy()
                for connection in wait(list(busy), timeout=0.5):
                    hear(busy[connection])
                view.update()
        finally:
            stop(self._seats)

    def _busy(self) -> dict[Connection, Seat]:
        return {seat.connection: seat for seat in self._seats if seat.cell is not None}


def give(seat: Seat, cell: Cell) -> None:
    """Hand a cell to the seat's worker, a new one where there is none."""
    if seat.process is None or not seat.process.is_alive():
        context = multiprocessing.get_context("spawn")
        seat.connection, theirs = context.Pipe()
        seat.process = context.Process(target=worker, args=(theirs, seat.slot.gpus))
        # Ctrl-C is the sweep's to answer, although a terminal sends it to every process: workers start with it blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            seat.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    seat.cell = cell
    cell.begin()
    with contextlib.suppress(OSError):  # it died just now: the end of its pipe will say so
        seat.connection.send(cell.experiment.toml())


def hear(seat: Seat) -> None:
    """Take one message; the seat is free again when its cell has ended."""
    try:
        message = seat.connection.recv()
    except (EOFError, OSError):
        seat.process.join(STOP_SECONDS)
        message = ("failed", f"the worker process died ({cause(seat.process.exitcode)})", None)
        seat.connection.close()
        seat.process = None
    seat.cell.hear(*message)
    if message[0] != "round":
        seat.cell = None


def cause(code: int | None) -> str:
    """An exit code in words; SIGKILL is mostly the kernel's answer to a lack of memory."""
    if code is None or code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}, out of memory?" if name == "SIGKILL" else name


def stop(seats: Sequence[Seat]) -> None:
    """End the workers: idle ones by a word, busy ones by a signal, as atomic writes allow at any moment."""
    running = [seat for seat in seats if seat.process is not None]
    for seat in running:
        if seat.cell is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(seat.process.pid, END)
        else:
            with contextlib.suppress(OSError):
                seat.connection.send(None)
    for seat in running:
        seat.process.join(STOP_SECONDS)
        if seat.process.is_alive():
            seat.process.kill()
            seat.process.join()
        seat.connection.close()
