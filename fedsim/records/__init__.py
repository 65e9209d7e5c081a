"""What a run writes and reads: records, environments, selection; without torch, ray, flwr or matplotlib."""

from fedsim.records.environment import environment
from fedsim.records.reading import TABLES, Runs, choose_runs, read_runs
from fedsim.records.recorder import Recorder
from fedsim.records.selection import select, summary_row

__all__ = ["TABLES", "Recorder", "Runs", "choose_runs", "environment", "read_runs", "select", "summary_row"]
