"""Fixtures of the tests of sweeps and searches."""

import gc

import pytest

from fedsim.studies.cell_process import run_cell
from fedsim.studies.pool import Waiting
from fedsim.studies.view import SweepView


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells run as in a worker of the pool, without its start, which takes longer than the cells."""

    def run_cells(cells, waiting, reservations, budget, blind):
        with SweepView(cells, 1, blind) as view:
            line = Waiting(waiting)
            while line:
                if cell := line.take():
                    cell.begin()
                    line.note(cell, run_cell(cell.experiment.toml(), lambda message, cell=cell: cell.note(*message)))
                view.update()

    gc.freeze()  # each cell ends with a search for garbage: among its own objects, not among all since the first test
    monkeypatch.setattr("fedsim.studies.loop.run_cells", run_cells)
