"""Records of runs: writing, reading, selecting, comparing; without torch, ray, flwr or matplotlib."""

from fedsim.results.compare import compare
from fedsim.results.comparison import Comparison
from fedsim.results.environment import environment
from fedsim.results.reading import TABLES, Runs, choose_runs, read_runs
from fedsim.results.recorder import Recorder
from fedsim.results.selection import select, summary_row

__all__ = [
    "TABLES",
    "Comparison",
    "Recorder",
    "Runs",
    "choose_runs",
    "compare",
    "environment",
    "read_runs",
    "select",
    "summary_row",
]
