"""Studies: many runs (cells) that are carried out together, several at the same time, without those that are finished.

A `Study` asks for cells, is told of their outcome and reports. Each kind of study is one file, and one loop, `loop.py`,
carries all of them out.
"""

from fedsim.studies.axes import Axes
from fedsim.studies.budget import Budget
from fedsim.studies.grid import run_sweep
from fedsim.studies.plan import Cell

__all__ = ["Axes", "Budget", "Cell", "run_sweep"]
