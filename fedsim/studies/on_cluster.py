"""Runs cells as Ray tasks on a cluster."""

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from fedsim.common.errors import UserError
from fedsim.common.workers import WorkerDiedError
from fedsim.runtime.cluster import NoRoomError, import_ray, open_cluster, plan_workers
from fedsim.runtime.ray import FORWARDED
from fedsim.runtime.ray_worker import essence, ready
from fedsim.settings import RunSettings
from fedsim.studies.budget import Budget
from fedsim.studies.cell_process import Message, for_elsewhere, run_cell_elsewhere
from fedsim.studies.plan import Cell
from fedsim.studies.pool import CallWorker, Pool

POLL_SECONDS = 0.5
TELL_SECONDS = 10.0  # at most, until the sweep's inbox has a machine's name; without one the cell runs all the same


class Inbox:
    """A Ray actor that keeps the messages of the tasks until the sweep reads them."""

    def __init__(self) -> None:
        self._messages: list[tuple[int, Message]] = []

    def tell(self, index: int, message: Message) -> None:
        """Store a message about the cell with this index."""
        self._messages.append((index, message))

    def take(self) -> list[tuple[int, Message]]:
        """Return and forget all stored messages."""
        messages, self._messages = self._messages, []
        return messages


def cell_task(index: int, settings: str, folder: str, home: str, variables: dict[str, str], inbox: Any) -> Message:
    """Run one cell on the machine that Ray chose. Its name has arrived before the run begins, which may be killed."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)  # a machine that has a data folder of its own uses that
    import_ray().wait([inbox.tell.remote(index, ("running", socket.gethostname(), None))], timeout=TELL_SECONDS)
    return run_cell_elsewhere(settings, folder, home, lambda message: inbox.tell.remote(index, message))


class RayPool(Pool):
    """A Ray cluster, which is started or found on entry."""

    def __init__(self, cells: Sequence[Cell], budget: Budget) -> None:
        super().__init__(cells, budget.jobs)
        self._settings = RunSettings(
            ray_address="" if budget.ray == "local" else budget.ray,
            cpus_per_worker=budget.cores or 1,
            gpus_per_worker=budget.gpus,
            device=cells[0].experiment.run.device,
        )

    def __enter__(self) -> "RayPool":
        self._ray = import_ray()
        self._own_cluster = open_cluster(self._settings)
        try:
            self._plan = plan_workers(self._settings, min(self.jobs, len(self.cells)))
        except NoRoomError as error:  # a sweep's options have other names than a run's settings
            self.__exit__()
            raise UserError(f"{error.lack('cells')}: lower --cores-per-cell or --gpus-per-cell") from None
        except BaseException:
            self.__exit__()
            raise
        self._inbox = self._ray.remote(num_cpus=0)(Inbox).remote()
        self._task = self._ray.remote(num_cpus=self._plan.cpus, num_gpus=self._plan.gpus, max_retries=0)(cell_task)
        self.workers = [CallWorker(self.submit, self._result, self._cancel) for _ in range(self.jobs)]
        return self

    def __exit__(self, *error: object) -> None:
        if self._own_cluster:
            self._ray.shutdown()

    @property
    def width(self) -> int:
        """The number of cells for which the cluster has room now; more machines may join it later."""
        return self._plan.workers

    def submit(self, cell: Cell) -> Any:
        """Start a task for a cell; returns the reference to its result."""
        variables = {name: os.environ[name] for name in FORWARDED if os.environ.get(name)}
        return self._task.remote(self.cells.index(cell), *for_elsewhere(cell), variables, self._inbox)

    def _result(self, call: Any) -> Message:
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            raise WorkerDiedError(f"the Ray task died: {essence(error)}") from error

    def _cancel(self, call: Any) -> None:
        self._ray.cancel(call, force=True)

    def ready(self, busy: Sequence[CallWorker]) -> list[CallWorker]:
        if not busy:
            time.sleep(POLL_SECONDS)
            return []
        done = ready(busy, POLL_SECONDS)
        self._read()
        return done

    def _read(self) -> None:
        """Read the progress. Without the inbox only the view is lost; the sweep continues."""
        errors = self._ray.exceptions
        with contextlib.suppress(errors.GetTimeoutError, errors.RayActorError):
            for index, message in self._ray.get(self._inbox.take.remote(), timeout=5):
                cell = self.cells[index]
                if message[0] == "round":
                    cell.note(*message)
                elif cell.state == "waiting":  # messages may arrive after the cell has ended
                    cell.begin(message[1])
