"""Methods x targets x seeds x grid values: every cell is one run, finished ones are skipped, several run at a time."""

from collections.abc import Callable, Sequence

from rich.table import Table

from fedsim.console import console, errors
from fedsim.sweep.axes import Axes
from fedsim.sweep.budget import Budget, Slot, local_slots
from fedsim.sweep.plan import Cell, dry_table, plan_cells
from fedsim.sweep.view import SweepView

__all__ = ["Axes", "Budget", "Cell", "run_sweep"]


def run_sweep(
    config: str,
    axes: Axes,
    budget: Budget,
    *,
    overrides: Sequence[str] = (),
    preset: str = "",
    dry_run: bool = False,
) -> list[Cell]:
    """Run all cells that are not finished; returns the failed ones. UserError before anything starts for bad input."""
    cells = plan_cells(config, axes, overrides, preset)
    return carry_out(cells, budget, dry_run, lambda slots: dry_table(cells, len(slots) or budget.jobs))


def carry_out(cells: list[Cell], budget: Budget, dry_run: bool, dry: Callable[[Sequence[Slot]], Table]) -> list[Cell]:
    """Run the cells that are not finished, or print what `dry` makes of the slots; returns the failed ones."""
    from fedsim.run.session import complete_finish, is_finished

    waiting = [cell for cell in cells if cell.state == "waiting"]
    device = cells[0].experiment.run.device
    slots = [] if budget.ray else local_slots(budget, device, cells[0].experiment.run.threads)[: len(waiting)]
    refused = [cell for cell in cells if cell.state == "failed"]
    done = len(cells) - len(waiting) - len(refused)
    impossible = f"{len(refused)} cannot run, " if refused else ""
    console.print(f"{len(cells)} cells, {done} finished, {impossible}{len(waiting)} to run, {manner(budget, slots)}")
    if dry_run:
        console.print(dry(slots))
        return report_failed(cells)
    try:
        if waiting:
            run_cells(cells, waiting, slots, budget)
    finally:
        ours = [cell.experiment for cell in cells if cell not in refused and is_finished(cell.folder)]
        for name in dict.fromkeys(experiment.name for experiment in ours):
            complete_finish(*(experiment for experiment in ours if experiment.name == name))
    return report_failed(cells)


def report_failed(cells: Sequence[Cell]) -> list[Cell]:
    """Print why each failed cell failed; the failed cells."""
    failed = [cell for cell in cells if cell.state == "failed"]
    for cell in failed:
        text = f"failed: {cell.title}: {cell.reason}"
        errors.print(text, style="red", highlight=False, markup=False, soft_wrap=True)
    return failed


def run_cells(cells: list[Cell], waiting: list[Cell], slots: list[Slot], budget: Budget) -> None:
    """Run the waiting cells on this machine's slots or on a Ray cluster, under the live view."""
    if budget.ray:
        from fedsim.sweep.on_ray import RayPool

        with RayPool(waiting, budget) as pool, SweepView(cells, pool.width) as view:
            pool.run(view)
        return
    from fedsim.sweep.pool import LocalPool

    with SweepView(cells, len(slots)) as view:
        LocalPool(waiting, slots).run(view)


def manner(budget: Budget, slots: Sequence[Slot]) -> str:
    """How the cells run, in words: `2 at a time with 1 core each`."""
    if budget.ray:
        return f"as Ray tasks ({budget.ray}), {budget.jobs or 'as many as fit'} at a time"
    if not slots:
        return "nothing to start"
    text = f"{len(slots)} at a time with {slots[0].cores} {'core' if slots[0].cores == 1 else 'cores'} each"
    gpus = sorted({name for slot in slots for name in slot.gpus})
    return text + (f", on GPU {', '.join(gpus)}" if gpus else "")
