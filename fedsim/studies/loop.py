"""The loop that carries out every study: it asks for cells, runs those that are not finished, and tells the study."""

import multiprocessing
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedsim.common.console import console, errors
from fedsim.common.errors import UserError
from fedsim.studies.budget import Budget, Reservation, local_reservations
from fedsim.studies.plan import Cell, look_for_data, missing_data
from fedsim.studies.study import Study
from fedsim.studies.view import SweepView

if TYPE_CHECKING:
    from fedsim.studies.pool import Pool


def carry_out(study: Study, budget: Budget, dry_run: bool = False) -> list[Cell]:
    """Run the cells of a study that are not finished, and have it report; returns the failed cells.

    A dry run prints the table of each step instead, as far as the study looks ahead. Raises UserError where the data
    of all cells of a step are missing, before any of them starts.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # a worker that imports the sweep's script
        raise UserError('start a sweep below `if __name__ == "__main__":`, because its workers import the script too')
    failed: dict[Path, Cell] = {}
    while cells := study.ask():
        look_for_data(cells, budget, dry_run)
        study.begin(dry_run)
        carry_out_step(study, cells, budget, dry_run)
        failed |= {cell.folder: cell for cell in report_failed(cells)}
        if dry_run and not study.looks_beyond(cells):
            return list(failed.values())
        study.tell(cells)
    study.report()
    return list(failed.values())


def carry_out_step(
    study: Study,
    cells: list[Cell],
    budget: Budget,
    dry_run: bool,
) -> None:
    """Run the waiting cells of a step, or print its table, below one line that counts its cells."""
    waiting = [cell for cell in cells if cell.state == "waiting"]
    runnable = [cell for cell in cells if cell.state != "failed"]
    run = cells[0].experiment.run
    reservations: list[Reservation] = []
    if not budget.remote:
        reservations = local_reservations(budget, run.device, run.threads)[: len(waiting)]
    show_counts(cells, budget, reservations)
    if dry_run:
        if not budget.remote:
            show_missing_data(cells)
        console.print(study.table(cells, len(reservations) or budget.jobs))
        return
    if waiting:
        collect(runnable)
    try:
        if waiting:
            run_cells(cells, waiting, reservations, budget, study.is_blind)
    finally:
        tidy(runnable)


def tidy(cells: Sequence[Cell]) -> None:
    """Remove what the finished cells have left over, and update the results.csv of their folders of results."""
    from fedsim.records.record_files import is_finished
    from fedsim.runs.leftovers import tidy_finished
    from fedsim.runs.plan import results_folder

    folders: dict[Path, list[Path]] = {}
    for cell in cells:
        if is_finished(cell.folder):
            folders.setdefault(results_folder(cell.experiment), []).append(cell.folder)
    for folder, runs in folders.items():
        tidy_finished(folder, runs)


def collect(cells: Sequence[Cell]) -> None:
    """Write results.csv of the cells' folders of results anew: their cells only append to it while they run."""
    from fedsim.records.record_files import is_finished
    from fedsim.records.results import write_results
    from fedsim.runs.plan import results_folder

    finished = [cell for cell in cells if is_finished(cell.folder)]
    for folder in dict.fromkeys(results_folder(cell.experiment) for cell in finished):
        write_results(folder)


def show_counts(cells: Sequence[Cell], budget: Budget, reservations: Sequence[Reservation]) -> None:
    """Print how many cells there are in each state, how they run, and which settings come too late for some."""
    from fedsim.runs.conflicts import too_late

    states = Counter(cell.state for cell in cells)
    texts = ["1 cell" if len(cells) == 1 else f"{len(cells)} cells"]
    texts.append(f"{states['finished']} finished")
    if states["failed"]:
        texts.append(f"{states['failed']} cannot run")
    texts.append(f"{states['waiting']} to run")
    texts.append(manner(budget, reservations))
    console.print(", ".join(texts))
    finished = [cell for cell in cells if cell.state == "finished"]
    warn(too_late((cell.folder, cell.experiment) for cell in finished))


def show_missing_data(cells: Sequence[Cell]) -> None:
    """Print one line when data of waiting cells are not on this machine, with the reasons that a sweep would give."""
    reasons = dict.fromkeys(reason for _, reason in missing_data(cells) if reason)
    if reasons:
        warn(f"The data are not on this machine: {'; '.join(reasons)}")


def warn(text: str) -> None:
    """Print a line in yellow next to the output; nothing for an empty text."""
    if text:
        errors.print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)


def report_failed(cells: Sequence[Cell]) -> list[Cell]:
    """Print why each failed cell failed; returns the failed cells."""
    failed = [cell for cell in cells if cell.state == "failed"]
    for cell in failed:
        text = f"failed: {cell.title}: {cell.reason}"
        errors.print(text, style="red", highlight=False, markup=False, soft_wrap=True)
    return failed


def run_cells(
    cells: list[Cell],
    waiting: list[Cell],
    reservations: list[Reservation],
    budget: Budget,
    blind: bool,
) -> None:
    """Run the waiting cells on this machine, on a Ray cluster or as Slurm jobs, and show the live view."""
    with pool_of(waiting, reservations, budget) as pool, SweepView(cells, pool.width, blind) as view:
        pool.run(view)


def pool_of(cells: list[Cell], reservations: list[Reservation], budget: Budget) -> "Pool":
    """Return the pool of this machine, or of the cluster that the budget names.

    Raises UserError for a cluster where `run.runtime` is another one than inline.
    """
    if not budget.remote:
        from fedsim.studies.pool import LocalPool

        return LocalPool(cells, reservations)
    runtime = cells[0].experiment.run.runtime
    if runtime != "inline":
        raise UserError(f"run.runtime {runtime!r}: cells on a cluster run inline, each in one task")
    from fedsim.studies.on_cluster import RayPool, SlurmPool

    return RayPool(cells, budget) if budget.ray else SlurmPool(cells, budget)


def manner(budget: Budget, reservations: Sequence[Reservation]) -> str:
    """Return how the cells run: `2 at a time with 1 core each`."""
    if budget.ray:
        return f"as Ray tasks ({budget.ray}), {budget.jobs or 'as many as fit'} at a time"
    if budget.launcher:
        return f"as jobs of submitit ({budget.launcher}), {budget.jobs or 'all'} at a time"
    if not reservations:
        return "nothing to start"
    cores = reservations[0].cores
    text = f"{len(reservations)} at a time with {cores} {'core' if cores == 1 else 'cores'} each"
    gpus: set[str] = set()
    for reservation in reservations:
        gpus.update(reservation.gpus)
    if gpus:
        text += f", on GPU {', '.join(sorted(gpus))}"
    return text
