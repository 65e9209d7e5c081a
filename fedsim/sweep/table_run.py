"""Runs all rows of a paper's table as one sweep, or (with --dry-run) shows its cells and the hours that they take."""

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from fedsim.common.console import console
from fedsim.sweep import carry_out
from fedsim.sweep.budget import Budget
from fedsim.sweep.estimate import Estimate, row_estimate
from fedsim.sweep.plan import Cell, look_for_data, rounds_on_disk
from fedsim.sweep.tables import COPY, Choice, PlannedRow, plan_table, read_table


def run_table(
    file: Path, choice: Choice, budget: Budget, *, overrides: Sequence[str], output: str, dry_run: bool
) -> list[Cell]:
    """Run all cells of a table that are not finished, below OUTPUT/<table>; returns the failed ones.

    Raises UserError when no data set of the table is there, before any cell starts.

    The table's file is copied into that folder, so that `fedsim compare` knows which printed numbers to show.
    """
    folder = Path(output or "outputs") / file.stem
    rows = plan_table(file, choice, overrides, str(folder))
    cells = list({cell.folder: cell for row in rows for cell in row.cells}.values())  # two rows may share one
    look_for_data(cells, budget, dry_run)
    if not dry_run:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(shutil.SameFileError):
            shutil.copyfile(file, folder / COPY)
    console.print(escape(read_table(file).title), highlight=False, soft_wrap=True)
    return carry_out(cells, budget, dry_run, lambda width: dry_rows(rows, width))


def dry_rows(rows: Sequence[PlannedRow], width: int) -> Table:
    """A table of the rows with their cells and hours; a row for which nothing is measured says so instead of hours."""
    table = Table("block", "row", "method", "targets", "seeds", "finished", "hours")
    estimates = []
    for row in rows:
        for cell in row.cells:
            cell.round = rounds_on_disk(cell)
        estimates.append(row_estimate(row.cells))
        table.add_row(*map(escape, cells_of(row, estimates[-1])))
    table.caption = caption(estimates, width or 1)
    return table


def cells_of(row: PlannedRow, found: Estimate) -> list[str]:
    """The texts of one row of that table."""
    runs = [cell.experiment.run for cell in row.cells]
    done = sum(cell.state == "finished" for cell in row.cells)
    hours = found.source if found.seconds is None else f"{found.seconds / 3600:.1f}"
    targets, seeds = ({run.target for run in runs}, {run.seed for run in runs})
    name = " ".join([row.row.method, *row.row.settings])
    return [row.block.name, row.row.title, name, str(len(targets)), str(len(seeds)), f"{done}/{len(runs)}", hours]


def caption(estimates: Sequence[Estimate], width: int) -> str:
    """A text with the total time and the measurements from which it follows."""
    hours = sum(each.seconds or 0.0 for each in estimates) / 3600
    unknown = sum(each.seconds is None for each in estimates)
    basis = "; ".join(dict.fromkeys(each.source for each in estimates if each.seconds))
    missing = f"{unknown} {'row is' if unknown == 1 else 'rows are'} not measured"
    if not basis:
        return f"time not known: {missing}; python benchmarks/steps.py --table NAME --record measures local steps"
    rest = f", and {missing}" if unknown else ""
    return f"{hours:.1f} hours one cell at a time, {hours / width:.1f} with {width} ({basis}){rest}"
