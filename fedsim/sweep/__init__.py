"""Studies: many runs (cells) that are carried out together, several at the same time, without those that are finished.

A grid, a search, draws, a search over combinations and the table of a paper are each a `Study` in a file of its own
(`grid.py`, `search.py`, `draws.py`, `combinations.py`, `tables.py`). One loop (`loop.py`) carries all of them out.
"""

from fedsim.sweep.axes import Axes
from fedsim.sweep.budget import Budget
from fedsim.sweep.grid import run_sweep
from fedsim.sweep.plan import Cell

__all__ = ["Axes", "Budget", "Cell", "run_sweep"]
