"""Records of runs: writing, reading, selecting, comparing, plotting, reporting; without torch, ray or flwr."""

from fedsim.results.compare import Comparison, compare
from fedsim.results.environment import environment
from fedsim.results.reading import Runs, read_runs, rebuild_results
from fedsim.results.recorder import Recorder, atomic_write
from fedsim.results.selection import select, summary_row

__all__ = [
    "Comparison", "Recorder", "Runs", "atomic_write", "compare", "environment", "read_runs", "rebuild_results",
    "select", "summary_row",
]
