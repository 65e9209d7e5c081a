"""Runs cells as Slurm jobs, one each, through submitit."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from fedsim.common.about import optional
from fedsim.common.errors import UserError
from fedsim.common.workers import WorkerDiedError
from fedsim.runs.claim import is_claimed
from fedsim.runs.plan import results_folder
from fedsim.studies.budget import Budget
from fedsim.studies.cell_process import Message, for_elsewhere, run_cell_elsewhere
from fedsim.studies.plan import Cell, rounds_on_disk
from fedsim.studies.pool import CallWorker, Pool

LAUNCHERS = ("slurm", "local")
LOGS = "slurm-jobs"  # in the experiment's folder
POLL_SECONDS = 2.0


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
        time.sleep(POLL_SECONDS)
        for worker in busy:
            cell = worker.tasks[0]
            if worker.call.done():
                yield worker
            elif cell.state == "waiting" and is_claimed(cell.folder):
                cell.begin(f"job {worker.call.job_id}")
            elif cell.state == "running" and (done := rounds_on_disk(cell)) > cell.round:
                cell.note("round", done, None)


def job_options(budget: Budget) -> tuple[str, int, dict[str, str]]:
    """(the launcher's name, minutes that a job may take, options of sbatch); UserError for what a job cannot have."""
    name, *words = budget.launcher.split()
    options = dict(word.partition("=")[::2] for word in words)
    if name not in LAUNCHERS:
        raise UserError(f"--launcher {name}: there are {' and '.join(LAUNCHERS)}; Ray is --ray")
    if bad := next((word for word in words if not options[word.partition("=")[0]]), ""):
        raise UserError(f"--launcher: {bad} is not KEY=VALUE, an option of sbatch such as partition=gpu or mem=16G")
    if budget.gpus != int(budget.gpus):
        raise UserError(f"--gpus-per-cell {budget.gpus:g}: a job of Slurm has whole GPUs")
    minutes = options.pop("time", "")
    if not minutes.isdecimal() or not int(minutes):
        raise UserError(f"--launcher {name} needs time=MINUTES; a cell that takes longer is queued again and goes on")
    return name, int(minutes), options
