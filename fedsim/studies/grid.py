"""A grid: one cell for each combination of method, target, seed and values of settings, all of them in one step."""

from collections.abc import Sequence

from fedsim.studies.axes import Axes
from fedsim.studies.budget import Budget
from fedsim.studies.loop import carry_out
from fedsim.studies.plan import Cell, plan_cells
from fedsim.studies.study import Study


class Grid(Study):
    """Cells that are known before the first of them runs."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._cells = list(cells)

    def ask(self) -> list[Cell]:
        cells, self._cells = self._cells, []
        return cells


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
