"""Runs cells on a cluster, each by one call that lives only for it: a Ray task, or a job of Slurm through submitit."""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fedsim.common.about import optional
from fedsim.common.errors import UserError
from fedsim.common.workers import Worker, WorkerDiedError
from fedsim.runs.claim import is_claimed
from fedsim.runs.plan import results_folder
from fedsim.runtime.cluster import NoRoomError, import_ray, open_cluster, plan_workers
from fedsim.runtime.ray import FORWARDED
from fedsim.runtime.ray_worker import essence, ready
from fedsim.settings import RunSettings
from fedsim.studies.budget import Budget
from fedsim.studies.cell_process import Message, for_elsewhere, run_cell_elsewhere
from fedsim.studies.plan import Cell, rounds_on_disk
from fedsim.studies.pool import Pool

RAY_SECONDS, SLURM_SECONDS = 0.5, 2.0  # between two looks at the calls
TELL_SECONDS = 10.0  # at most, until the sweep's inbox has a machine's name; without one the cell runs all the same
LAUNCHERS = ("slurm", "local")
LOGS = "slurm-jobs"  # in the experiment's folder


class CallWorker(Worker[Cell, Message]):
    """Runs a cell by a call of a cluster, a Ray task or a Slurm job, and lives only for it.

    submit: starts the call for a cell
    result: the last message of a call that is over; WorkerDiedError when it has died
    cancel: ends a call, whose cell can be resumed
    """

    def __init__(
        self, submit: Callable[[Cell], Any], result: Callable[[Any], Message], cancel: Callable[[Any], object]
    ) -> None:
        super().__init__()
        self._submit, self._result, self._cancel = submit, result, cancel
        self.call: Any = None

    @property
    def is_running(self) -> bool:
        return self.call is not None

    def send(self, tasks: Sequence[Cell]) -> None:
        self.call, self.sent = self._submit(tasks[0]), 1

    def results(self) -> list[Message]:
        call, self.call = self.call, None
        return [self._result(call)]

    def failure(self, task: Cell, cause: str) -> Message:
        return "failed", cause, None

    def ask_to_end(self) -> None:
        self._cancel(self.call)

    def release(self, deadline: float) -> None:
        self.call = None


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
        reserve = self._ray.remote(
            num_cpus=self._plan.cpus,
            num_gpus=self._plan.gpus,
            max_retries=0,
        )
        self._task = reserve(cell_task)
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
            time.sleep(RAY_SECONDS)
            return []
        done = ready(busy, RAY_SECONDS)
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


def import_submitit() -> Any:
    """The package submitit; UserError when it is not installed."""
    return optional("submitit", "--launcher needs the package submitit", "slurm")


class CellJob:
    """What a job does. One that Slurm ends too early is queued again by submitit, and goes on with the cell."""

    def __call__(self, settings: str, folder: str, home: str) -> Message:
        """Run the cell; its progress is read from its records."""
        return run_cell_elsewhere(settings, folder, home, lambda message: None)

    def checkpoint(self, *words: str) -> Any:
        """What submitit queues again."""
        return import_submitit().helpers.DelayedSubmission(self, *words)


class SlurmPool(Pool):
    """Jobs of Slurm, or of submitit on this machine."""

    def __init__(self, cells: Sequence[Cell], budget: Budget) -> None:
        super().__init__(cells, budget.jobs)
        self.workers = [CallWorker(self.submit, self._result, self._cancel) for _ in range(self.jobs)]
        name, minutes, options = job_options(budget)
        submitit = import_submitit()
        self._died = submitit.core.utils.UncompletedJobError, submitit.core.utils.FailedJobError
        try:
            self._executor = submitit.AutoExecutor(results_folder(cells[0].experiment) / LOGS, cluster=name)
        except RuntimeError as error:  # it finds no srun
            raise UserError(f"--launcher {name}: {error}") from None
        self._executor.update_parameters(
            name="fedsim",
            timeout_min=minutes,
            cpus_per_task=budget.cores or max(cells[0].experiment.run.threads, 1),
            gpus_per_node=int(budget.gpus) or None,
            slurm_additional_parameters=options,
        )

    def submit(self, cell: Cell) -> Any:
        """Start a job for a cell; returns the job."""
        return self._executor.submit(CellJob(), *for_elsewhere(cell))

    def _result(self, job: Any) -> Message:
        try:
            return job.result()
        except self._died as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise WorkerDiedError(f"job {job.job_id} died: {lines[-1]} (log: {job.paths.stderr})") from error

    def _cancel(self, job: Any) -> None:
        job.cancel(check=False)

    def ready(self, busy: Sequence[CallWorker]) -> Iterator[CallWorker]:
        time.sleep(SLURM_SECONDS)
        for worker in busy:
            cell = worker.tasks[0]
            if worker.call.done():
                yield worker
            elif cell.state == "waiting" and is_claimed(cell.folder):
                cell.begin(f"job {worker.call.job_id}")
            elif cell.state == "running":
                done = rounds_on_disk(cell)
                if done > cell.round:
                    cell.note("round", done, None)


def job_options(budget: Budget) -> tuple[str, int, dict[str, str]]:
    """(the launcher's name, minutes that a job may take, options of sbatch); UserError for what a job cannot have."""
    name, *words = budget.launcher.split()
    options = dict(word.partition("=")[::2] for word in words)
    if name not in LAUNCHERS:
        raise UserError(f"--launcher {name}: there are {' and '.join(LAUNCHERS)}; Ray is --ray")
    for word in words:
        key = word.partition("=")[0]
        if not options[key]:
            raise UserError(
                f"--launcher: {word} is not KEY=VALUE, an option of sbatch such as partition=gpu or mem=16G"
            )
    if budget.gpus != int(budget.gpus):
        raise UserError(f"--gpus-per-cell {budget.gpus:g}: a job of Slurm has whole GPUs")
    minutes = options.pop("time", "")
    if not minutes.isdecimal() or not int(minutes):
        raise UserError(f"--launcher {name} needs time=MINUTES; a cell that takes longer is queued again and goes on")
    return name, int(minutes), options
