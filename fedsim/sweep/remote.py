"""Runs cells as tasks of a cluster of one or more machines; all of them must see the same output folder."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedsim.common.errors import UserError
from fedsim.sweep.budget import Budget
from fedsim.sweep.cell_process import Message
from fedsim.sweep.plan import Cell
from fedsim.sweep.view import SweepView
from fedsim.sweep.waiting import Waiting


class RemotePool(ABC):
    """Context manager for a cluster: finds or starts it, runs the cells, and cancels the remaining ones at the end."""

    def __init__(self, cells: Sequence[Cell], budget: Budget) -> None:
        self.cells, self.jobs, run = list(cells), budget.jobs or len(cells), cells[0].experiment.run
        if run.runtime != "inline":
            raise UserError(f"run.runtime {run.runtime!r}: cells on a cluster run inline, each in one task")

    def __enter__(self) -> "RemotePool":
        return self

    def __exit__(self, *error: object) -> None:
        return

    @property
    def width(self) -> int:
        """The number of cells that run at the same time, as far as it is known."""
        return min(self.jobs, len(self.cells))

    @abstractmethod
    def submit(self, cell: Cell) -> Any:
        """Start a task for a cell, whose folder is there; returns the task."""

    @abstractmethod
    def ended(self, tasks: Mapping[Any, Cell]) -> Iterable[tuple[Any, Message]]:
        """Wait a moment, and note the progress of the cells; the tasks that have ended, each with its last message."""

    @abstractmethod
    def cancel(self, task: Any) -> None:
        """End a task; its cell can be resumed."""

    def run(self, view: SweepView) -> None:
        """Run all cells. A cell whose task dies is reported as failed; after Ctrl-C every cell can be resumed."""
        waiting, tasks = Waiting(self.cells), dict[Any, Cell]()
        try:
            while waiting or tasks:
                while len(tasks) < self.jobs and (cell := waiting.take()) is not None:
                    cell.folder.mkdir(parents=True, exist_ok=True)
                    cell.state = "waiting"
                    tasks[self.submit(cell)] = cell
                for task, message in self.ended(tasks):
                    waiting.hear(tasks.pop(task), message)
                view.update()
        finally:
            for task in tasks:
                self.cancel(task)
