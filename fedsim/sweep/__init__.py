"""A sweep: one run (a cell) for each combination of method, target, seed and grid values.

Cells that are finished are skipped, and several cells run at the same time.
"""

import multiprocessing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from fedsim.common.console import console, errors
from fedsim.common.errors import UserError
from fedsim.sweep.axes import Axes
from fedsim.sweep.budget import Budget, Reservation, local_reservations
from fedsim.sweep.plan import Cell, dry_table, look_for_data, missing_data, plan_cells
from fedsim.sweep.view import SweepView

if TYPE_CHECKING:
    from fedsim.sweep.waiting import Pool

__all__ = ["Axes", "Budget", "Cell", "run_sweep"]


def run_sweep(
    config: str, axes: Axes, budget: Budget, *, overrides: Sequence[str] = (), preset: str = "", dry_run: bool = False
) -> list[Cell]:
    """Run all cells that are not finished; returns the failed cells.

    Raises UserError for wrong input, also for a data set that is not there, before any cell starts. On a Ray cluster
    only the cells themselves look for their data.
    """
    cells = plan_cells(config, axes, overrides, preset)
    look_for_data(cells, budget, dry_run)
    return carry_out(cells, budget, dry_run)


def carry_out(
    cells: list[Cell], budget: Budget, dry_run: bool, dry: Callable[[int], Table] | None = None, blind: bool = False
) -> list[Cell]:
    """Run the cells that are not finished, or only print their table; returns the failed cells.

    dry: makes another table, for the number of cells that run at the same time (0: not known)
    blind: the live view shows nothing that was measured on the unseen domain
    """
    from fedsim.run.conflicts import too_late
    from fedsim.run.leftovers import is_finished, tidy_finished
    from fedsim.run.plan import results_folder

    if getattr(multiprocessing.current_process(), "_inheriting", False):  # a worker that imports the sweep's script
        raise UserError('start a sweep below `if __name__ == "__main__":`, because its workers import the script too')
    waiting = [cell for cell in cells if cell.state == "waiting"]
    device = cells[0].experiment.run.device
    threads = cells[0].experiment.run.threads
    reservations = [] if budget.remote else local_reservations(budget, device, threads)[: len(waiting)]
    refused = [cell for cell in cells if cell.state == "failed"]
    done = sum(cell.state == "finished" for cell in cells)
    impossible = f"{len(refused)} cannot run, " if refused else ""
    how = manner(budget, reservations)
    total = f"{len(cells)} {'cell' if len(cells) == 1 else 'cells'}"
    console.print(f"{total}, {done} finished, {impossible}{len(waiting)} to run, {how}")
    if late := too_late((cell.folder, cell.experiment) for cell in cells if cell.state == "finished"):
        errors.print(late, style="yellow", highlight=False, markup=False, soft_wrap=True)
    if dry_run:
        if not budget.remote:
            say_missing(cells)
        width = len(reservations) or budget.jobs
        console.print(dry(width) if dry else dry_table(cells, width))
        return report_failed(cells)
    try:
        if waiting:
            run_cells(cells, waiting, reservations, budget, blind)
    finally:
        ours = [cell for cell in cells if cell not in refused and is_finished(cell.folder)]
        for folder in dict.fromkeys(results_folder(cell.experiment) for cell in ours):
            tidy_finished(folder, [cell.folder for cell in ours if results_folder(cell.experiment) == folder])
    return report_failed(cells)


def say_missing(cells: Sequence[Cell]) -> None:
    """Print one line when data of waiting cells are not on this machine, with the reasons that a sweep would give."""
    if reasons := dict.fromkeys(reason for _, reason in missing_data(cells) if reason):
        text = f"The data are not on this machine: {'; '.join(reasons)}"
        errors.print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)


def report_failed(cells: Sequence[Cell]) -> list[Cell]:
    """Print why each failed cell failed; returns the failed cells."""
    failed = [cell for cell in cells if cell.state == "failed"]
    for cell in failed:
        text = f"failed: {cell.title}: {cell.reason}"
        errors.print(text, style="red", highlight=False, markup=False, soft_wrap=True)
    return failed


def run_cells(
    cells: list[Cell], waiting: list[Cell], reservations: list[Reservation], budget: Budget, blind: bool
) -> None:
    """Run the waiting cells on this machine, on a Ray cluster or as Slurm jobs, and show the live view."""
    with pool_of(waiting, reservations, budget) as pool, SweepView(cells, pool.width, blind) as view:
        pool.run(view)


def pool_of(cells: list[Cell], reservations: list[Reservation], budget: Budget) -> "Pool":
    """The pool of this machine, or of the cluster that the budget names."""
    if not budget.remote:
        from fedsim.sweep.pool import LocalPool

        return LocalPool(cells, reservations)
    runtime = cells[0].experiment.run.runtime
    if runtime != "inline":
        raise UserError(f"run.runtime {runtime!r}: cells on a cluster run inline, each in one task")
    if budget.ray:
        from fedsim.sweep.on_ray import RayPool

        return RayPool(cells, budget)
    from fedsim.sweep.on_slurm import SlurmPool

    return SlurmPool(cells, budget)


def manner(budget: Budget, reservations: Sequence[Reservation]) -> str:
    """A text that says how the cells run: `2 at a time with 1 core each`."""
    if budget.ray:
        return f"as Ray tasks ({budget.ray}), {budget.jobs or 'as many as fit'} at a time"
    if budget.launcher:
        return f"as jobs of submitit ({budget.launcher}), {budget.jobs or 'all'} at a time"
    if not reservations:
        return "nothing to start"
    each = reservations[0].cores
    text = f"{len(reservations)} at a time with {each} {'core' if each == 1 else 'cores'} each"
    gpus = sorted({name for reservation in reservations for name in reservation.gpus})
    return text + (f", on GPU {', '.join(gpus)}" if gpus else "")
