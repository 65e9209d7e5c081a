"""Studies: many runs (cells) that are carried out together, several at the same time, without those that are finished.

A `Study` asks for cells, is told of their outcome and reports. Each kind of study is one file, and one loop, `loop.py`,
carries all of them out.
"""

from fedsim.sweep.axes import Axes
from fedsim.sweep.budget import Budget
from fedsim.sweep.grid import run_sweep
from fedsim.sweep.plan import Cell

__all__ = ["Axes", "Budget", "Cell", "run_sweep"]
