"""Records of runs: writing, reading, selecting, comparing, plotting, reporting; without torch, ray or flwr."""

from importlib import import_module
from typing import Any

from fedsim.results.compare import Comparison, compare
from fedsim.results.environment import environment
from fedsim.results.reading import TABLES, Runs, choose_runs, read_runs, rebuild_results
from fedsim.results.recorder import Recorder
from fedsim.results.selection import select, summary_row

# matplotlib takes a second to import, and a run that only records does not need it.
LAZY = {"plot_all": "fedsim.results.plots", "write_report": "fedsim.results.report"}

__all__ = [
    "TABLES",
    "Comparison",
    "Recorder",
    "Runs",
    "choose_runs",
    "compare",
    "environment",
    "plot_all",
    "read_runs",
    "rebuild_results",
    "select",
    "summary_row",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(import_module(LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
