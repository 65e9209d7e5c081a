"""The live view of a sweep: a progress bar over all rounds, the time left, and the running cells."""

import csv
import json
import time
from collections import Counter
from pathlib import Path

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from fedsim.common.console import errors
from fedsim.common.files import atomic_write
from fedsim.common.tasks import TASKS, Task
from fedsim.data.benchmarks import task_of_data
from fedsim.records.selection import DEFAULT_RULE
from fedsim.settings.run import NO_TARGET
from fedsim.studies.estimate import duration, measured_rates, observed_rates, time_left
from fedsim.studies.plan import ENDED, Cell

STATE = "sweep.json"  # in the folder of the experiment, for `fedsim report --live`
NOTED_SECONDS = 2.0
UPDATE_SECONDS = 0.25  # between two looks at all cells, of which each message of a round would be one
STATES = ("finished", "running", "elsewhere", "waiting", "failed", "pruned")  # in the order in which they are counted


def task_of(cell: Cell) -> Task:
    """The task of a cell's data."""
    return TASKS[task_of_data(cell.experiment.data)]


def recorded(folder: Path, rule: str, quantity: str) -> float | None:
    """Return what a run recorded in the round of a selection rule; None without a value.

    quantity: "target" on the unseen domain, "mean_validation" on the validation examples of the sources
    """
    file = folder / "summary.csv"
    if not file.is_file():
        return None
    lines = file.read_text(encoding="utf-8").splitlines()
    for row in csv.DictReader(lines):
        for name, value in row.items():
            if name.startswith(f"{rule}_{quantity}_") and value:
                return float(value)
    return None


def _result(cell: Cell) -> str:
    """Return the selected result of a finished cell, which a table shows, and the one of its last round, in words.

    They are of the unseen domain, or of the validation where no domain is unseen.
    """
    task = task_of(cell)
    quantity, place = "target", ""
    if cell.experiment.run.target == NO_TARGET:
        quantity, place = "mean_validation", " in validation"
    last = recorded(cell.folder, "last", quantity)
    if last is None:
        last = cell.target_accuracy
    if last is None:
        return ""
    of_last = f" {task.text(last)} at the last round"
    selected = recorded(cell.folder, DEFAULT_RULE, quantity)
    if selected is None:
        return of_last
    return f" {task.text(selected)}{place} at the selected round,{of_last}"


class SweepView:
    """Live table of the running cells; one line for each cell that has ended.

    blind: nothing that was measured on the unseen domain is shown, for a search, which must not choose by it
    """

    def __init__(
        self,
        cells: list[Cell],
        width: int,
        blind: bool = False,
    ) -> None:
        self._cells, self._width, self._blind = cells, width, blind
        self._open = [cell for cell in cells if cell.state == "waiting"]
        self._rates = measured_rates(self._open)
        self._progress = Progress(
            TextColumn("sweep"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds  {task.fields[left]}"),
            console=errors,
        )
        rounds = sum(cell.experiment.train.rounds for cell in self._open)
        self._task = self._progress.add_task("sweep", total=rounds, left="")
        self._todo = list(self._open)
        self._noted = self._updated = 0.0
        self._waits = False  # for other processes alone
        self._live = Live(console=errors, refresh_per_second=4, transient=True, get_renderable=self.render)

    def __enter__(self) -> "SweepView":
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._update()
        self._live.stop()
        self._note(None, ended=True)
        states = Counter(cell.state for cell in self._cells)
        text = f"{states['finished']} of {len(self._cells)} cells finished"
        if states["failed"]:
            text += f", {states['failed']} failed"
        errors.print(text)

    def update(self) -> None:
        """Print a line for each cell that has ended, and update the bar from the cells, a few times a second."""
        if time.monotonic() - self._updated > UPDATE_SECONDS:
            self._update()

    def _update(self) -> None:
        self._updated = time.monotonic()
        ended = [cell for cell in self._open if cell.state in ENDED]
        for cell in ended:
            self._open.remove(cell)
            self._print(self._end_of(cell))
        is_waiting = all(cell.state == "elsewhere" for cell in self._open)
        if self._open and is_waiting and not self._waits:
            self._waits = True
            self._live.console.print(f"waiting for other processes, which run the last cells: {len(self._open)}")
        self._rates |= observed_rates(self._todo)
        seconds = time_left(self._todo, self._rates, self._width)
        if time.monotonic() - self._noted > NOTED_SECONDS:
            self._note(seconds)
        done = sum(cell.experiment.train.rounds - cell.rounds_left for cell in self._todo)
        left = "" if seconds is None else f"{duration(seconds)} left"
        self._progress.update(self._task, completed=done, left=left)

    def _print(self, text: str) -> None:
        self._live.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _end_of(self, cell: Cell) -> str:
        """The line about a cell that has ended: its state, and the accuracy or the reason."""
        text = f"{cell.state}: {cell.title}"
        if cell.state == "finished" and not self._blind:
            text += _result(cell)
        return f"{text}: {cell.reason}" if cell.reason else text

    def _note(self, left: float | None, ended: bool = False) -> None:
        """Write the state of the cells into the folders of their experiments. After the sweep only failures remain."""
        self._noted = time.monotonic()
        by_folder: dict[Path, list[Cell]] = {}
        for cell in self._cells:
            by_folder.setdefault(cell.folder.parents[2], []).append(cell)
        for folder, cells in by_folder.items():
            states = [state_of(cell) for cell in cells if not ended or cell.state == "failed"]
            if states and folder.is_dir():
                atomic_write(folder / STATE, json.dumps({"time": time.time(), "left": left, "cells": states}))
            else:
                (folder / STATE).unlink(missing_ok=True)

    def render(self) -> Group:
        """Return the bar, the number of cells in each state, and a line for each running cell."""
        table = Table("cell", "round", "" if self._blind else "target", "left", "", box=None)
        for cell in self._cells:
            if cell.state == "running":
                table.add_row(Text(cell.title), *self._progress_of(cell), cell.place)
        states = Counter(cell.state for cell in self._cells)
        counts = [f"{states[state]} {state}" for state in STATES if states[state]]
        return Group(self._progress, f"cells: {', '.join(counts)}", table)

    def _progress_of(self, cell: Cell) -> tuple[str, str, str]:
        """(rounds, accuracy on the target, time left) of a running cell as text."""
        accuracy = ""
        if cell.target_accuracy is not None and not self._blind:
            accuracy = task_of(cell).text(cell.target_accuracy)
        seconds = time_left([cell], observed_rates([cell]), 1)
        left = "" if seconds is None else duration(seconds)
        return f"{cell.round}/{cell.experiment.train.rounds}", accuracy, left


def state_of(cell: Cell) -> dict[str, str | int]:
    """Return what `fedsim report --live` reads of a cell."""
    return {
        "title": cell.title,
        "folder": str(cell.folder.resolve()),
        "state": cell.state,
        "round": cell.round,
        "rounds": cell.experiment.train.rounds,
        "reason": cell.reason,
    }
