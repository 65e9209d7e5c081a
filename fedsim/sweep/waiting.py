"""The cells that a sweep still has to run, of which other sweeps on the same folder may run some, and who runs them."""

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from fedsim.run import admission
from fedsim.run.claim import is_claimed
from fedsim.run.leftovers import is_finished
from fedsim.run.plan import resolve
from fedsim.sweep.cell_process import Message
from fedsim.sweep.plan import PRUNED, Cell, refusal_of
from fedsim.sweep.view import SweepView

LOOK_SECONDS = 1.0  # between two looks at cells that others hold


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
            elif is_finished(cell.folder):
                cell.hear(*_verdict(cell))
            elif cell.doomed and cell.doomed():  # another process has left it for that
                cell.hear(PRUNED, "", None)
            else:
                return cell
        self._next_look = time.monotonic() + LOOK_SECONDS
        return None

    def hear(self, cell: Cell, message: Message) -> None:
        """Note a message about a cell that was taken; one that another process has claimed before comes back."""
        if message[0] == "claimed":
            self._pass_over(cell)
        else:
            cell.hear(*message)

    def _pass_over(self, cell: Cell) -> None:
        cell.state = "elsewhere"
        self._cells.append(cell)


def _verdict(cell: Cell) -> Message:
    """The message that another process's finished run deserves: it may be one with other settings."""
    reason = refusal_of(lambda: admission.check_folder(resolve(cell.experiment)))
    return "failed" if reason else "finished", reason, None


class Pool(AbstractContextManager):
    """Runs cells, each as a task of a machine or a cluster, which may be found or started on entry."""

    def __init__(self, cells: Sequence[Cell], jobs: int) -> None:
        self.cells, self.jobs = list(cells), jobs or len(cells)

    def __exit__(self, *error: object) -> None:
        return

    @property
    def width(self) -> int:
        """The number of cells that run at the same time, as far as it is known."""
        return min(self.jobs, len(self.cells))

    @abstractmethod
    def submit(self, cell: Cell) -> Any:
        """Start a task for a cell; returns the task."""

    @abstractmethod
    def ended(self, tasks: Mapping[Any, Cell]) -> Iterable[tuple[Any, Message]]:
        """Wait a moment, and note the progress of the cells; the tasks that have ended, each with its last message."""

    @abstractmethod
    def stop(self, tasks: Iterable[Any]) -> None:
        """End the tasks; their cells can be resumed."""

    def run(self, view: SweepView) -> None:
        """Run all cells. A cell whose task dies is reported as failed; after Ctrl-C every cell can be resumed."""
        waiting, tasks = Waiting(self.cells), dict[Any, Cell]()
        try:
            while waiting or tasks:
                while len(tasks) < self.jobs and (cell := waiting.take()) is not None:
                    tasks[self.submit(cell)] = cell
                for task, message in self.ended(tasks):
                    waiting.hear(tasks.pop(task), message)
                view.update()
        finally:
            self.stop(tasks)
