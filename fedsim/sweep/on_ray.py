"""Runs cells as Ray tasks on a cluster of one or more machines; all of them must see the same output folder."""

import contextlib
import os
import socket
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedsim.common.errors import UserError
from fedsim.runtime.cluster import NoRoomError, import_ray, open_cluster, plan_workers
from fedsim.runtime.ray import FORWARDED
from fedsim.settings import RunSettings
from fedsim.sweep.budget import Budget
from fedsim.sweep.cell_process import Message, run_cell
from fedsim.sweep.plan import Cell
from fedsim.sweep.view import SweepView


class Mailbox:
    """A Ray actor that keeps the messages of the tasks until the sweep reads them."""

    def __init__(self) -> None:
        self._letters: list[tuple[int, Message]] = []

    def tell(self, index: int, message: Message) -> None:
        """Store a message about the cell with this index."""
        self._letters.append((index, message))

    def take(self) -> list[tuple[int, Message]]:
        """Return and forget all stored messages."""
        letters, self._letters = self._letters, []
        return letters


def cell_task(index: int, settings: str, folder: str, home: str, variables: dict[str, str], mailbox: Any) -> Message:
    """Run one cell on the machine that Ray chose; relative paths start at the folder where the sweep was started."""
    if Path(home).is_dir():
        os.chdir(home)
    if not Path(folder).is_dir():  # the sweep has created it
        return (
            "failed",
            f"{socket.gethostname()} does not see {folder}: put --output on storage that all machines share",
            None,
        )
    for name, value in variables.items():
        os.environ.setdefault(name, value)  # a machine that has a data folder of its own uses that
    mailbox.tell.remote(index, ("running", socket.gethostname(), None))
    return run_cell(settings, lambda message: mailbox.tell.remote(index, message))


class RayPool:
    """Context manager for a cluster: finds or starts it, runs the cells, and cancels the remaining ones at the end."""

    def __init__(self, cells: Sequence[Cell], budget: Budget) -> None:
        self._cells, self._jobs = list(cells), budget.jobs or len(cells)
        run = cells[0].experiment.run
        if run.runtime != "inline":
            raise UserError(f"run.runtime {run.runtime!r}: the cells of a Ray sweep run inline, each in one Ray task")
        self._settings = RunSettings(
            ray_address="" if budget.ray == "local" else budget.ray,
            cpus_per_worker=budget.cores or 1,
            gpus_per_worker=budget.gpus,
            device=run.device,
        )

    def __enter__(self) -> "RayPool":
        self._ray = import_ray()
        self._own_cluster = open_cluster(self._settings)
        try:
            self._plan = plan_workers(self._settings, min(self._jobs, len(self._cells)))
        except NoRoomError as error:  # a sweep's options have other names than a run's settings
            self.__exit__()
            raise UserError(f"{error.lack('cells')}: lower --cores-per-cell or --gpus-per-cell") from None
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._own_cluster:
            self._ray.shutdown()

    @property
    def width(self) -> int:
        """The number of cells for which the cluster has room now; more machines may join it later."""
        return self._plan.workers

    def run(self, view: SweepView) -> None:
        """Run all cells. A cell whose task dies is reported as failed; after Ctrl-C every cell can be resumed."""
        mailbox = self._ray.remote(num_cpus=0)(Mailbox).remote()
        task = self._ray.remote(num_cpus=self._plan.cpus, num_gpus=self._plan.gpus, max_retries=0)(cell_task)
        queue = deque(enumerate(self._cells))
        tasks: dict[Any, Cell] = {}
        try:
            while queue or tasks:
                while queue and len(tasks) < self._jobs:
                    index, cell = queue.popleft()
                    tasks[self._submit(task, index, cell, mailbox)] = cell
                done, _ = self._ray.wait(list(tasks), timeout=0.5)
                self._read(mailbox)
                for reference in done:
                    tasks.pop(reference).hear(*self._result(reference))
                view.update()
        finally:
            for reference in tasks:
                self._ray.cancel(reference, force=True)

    def _submit(self, task: Any, index: int, cell: Cell, mailbox: Any) -> Any:
        cell.folder.mkdir(parents=True, exist_ok=True)
        settings = cell.experiment.toml()
        variables = {name: os.environ[name] for name in FORWARDED if os.environ.get(name)}
        return task.remote(index, settings, str(cell.folder), str(Path.cwd()), variables, mailbox)

    def _read(self, mailbox: Any) -> None:
        """Read the progress. Without the mailbox only the view is lost; the sweep continues."""
        errors = self._ray.exceptions
        with contextlib.suppress(errors.GetTimeoutError, errors.RayActorError):
            for index, message in self._ray.get(mailbox.take.remote(), timeout=5):
                cell = self._cells[index]
                if message[0] == "round":
                    cell.hear(*message)
                elif cell.state == "waiting":  # messages may arrive after the cell has ended
                    cell.begin(message[1])

    def _result(self, reference: Any) -> Message:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            return "failed", f"the Ray task died: {lines[0]}", None
