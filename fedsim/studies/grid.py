"""A grid: one cell for each combination of method, target, seed and values of settings, all of them in one step."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from fedsim.common.console import console, say
from fedsim.common.tables import LABEL, Column, Row, Table
from fedsim.common.tasks import Task
from fedsim.records.record_files import NO_NUMBER
from fedsim.records.selection import DEFAULT_RULE
from fedsim.settings.run import NO_TARGET
from fedsim.studies.axes import Axes
from fedsim.studies.budget import Budget
from fedsim.studies.loop import carry_out
from fedsim.studies.plan import Cell, plan_cells
from fedsim.studies.study import Study
from fedsim.studies.view import task_of


class Grid(Study):
    """Cells that are known before the first of them runs."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._cells = list(cells)
        self._all = list(cells)

    def ask(self) -> list[Cell]:
        cells, self._cells = self._cells, []
        return cells

    def report(self) -> None:
        """Print a small table for each folder of results, and the commands that show more of them.

        Runs on all domains, of which none is unseen, are in no table, and no comparison takes them.
        """
        folders: dict[Path, list[Cell]] = {}
        for cell in self._all:
            if cell.state == "finished":
                folders.setdefault(cell.folder.parents[2], []).append(cell)
        for folder, cells in folders.items():
            unseen = [cell for cell in cells if cell.experiment.run.target != NO_TARGET]
            if not unseen:
                say(f"next: fedsim plot {folder}; fedsim export {cells[0].folder}")
                continue
            table = small_table(folder.name, task_of(unseen[0]), unseen)
            table.show(console)
            baseline = " --baseline fedavg" if (folder / "fedavg").is_dir() else ""
            say(f"next: fedsim compare {folder}{baseline}; fedsim report {folder}")


def small_table(name: str, task: Task, cells: Iterable[Cell]) -> Table:
    """A row for each method: its finished cells, and their mean on the unseen domains in the selected round.

    A run that measured nothing on its unseen domain counts among the cells, and not in the mean.
    """
    by_method: dict[str, list[float | None]] = {}
    for cell in cells:
        method = cell.folder.parents[1].name
        value = selected_on_target(cell.folder, task)
        by_method.setdefault(method, []).append(value)
    rows = []
    for method, values in by_method.items():
        measured = [value for value in values if value is not None]
        mean = task.text(fmean(measured)) if measured else ""
        row = [method, str(len(values)), mean]
        rows.append(Row(row))
    columns = [LABEL, Column("cells"), Column("mean of the cells")]
    return Table(columns, rows, f"{name}: {task.title} on the unseen domains, best source validation")


def selected_on_target(folder: Path, task: Task) -> float | None:
    """The task's metric on a run's unseen domain in the round of the best source validation.

    None where the run did not measure it there, and where it is undefined.
    """
    file = folder / "summary.csv"
    if not file.is_file():
        return None
    (row,) = csv.DictReader(file.read_text(encoding="utf-8").splitlines())
    value = row.get(f"{DEFAULT_RULE}_target_{task.metric}") or ""
    return None if value in NO_NUMBER else float(value)


def run_sweep(
    config: str,
    axes: Axes,
    budget: Budget,
    *,
    overrides: Sequence[str] = (),
    preset: str = "",
    dry_run: bool = False,
) -> list[Cell]:
    """Run all cells that are not finished; returns the failed cells.

    Raises UserError for wrong input, also for a data set that is not there, before any cell starts. On a Ray cluster
    only the cells themselves look for their data.
    """
    return carry_out(Grid(plan_cells(config, axes, overrides, preset)), budget, dry_run)
