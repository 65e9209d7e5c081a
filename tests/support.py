"""Helpers of several test folders: a small experiment on real digits, an observed inline run, reading of records."""

import json
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pandas as pd
import pytest

from fedsim.records.callbacks import RunCallback
from fedsim.runs.plan import complete, resolve, run_folder
from fedsim.runs.serve import serve
from fedsim.runtime.watched import WatchedGrid as SpyGrid
from fedsim.settings.experiment import Experiment, from_table


def small_experiment(output: Path | str, method: dict | str = "fedavg", **sections: dict) -> Experiment:
    """Four rotations of 100 real digits each, the CNN with batch norm, three rounds; a run takes a second."""
    table = {
        "name": "small",
        "data": {
            "dataset": "digits",
            "domains": ["rot0", "rot15", "rot30", "rot45"],
            "fraction": 0.1,
            "split": "stratified",
            "holdout": 0.2,
        },
        "train": {"rounds": 3, "batch_size": 32, "lr": 0.05, "momentum": 0.5},
        "method": {"name": method} if isinstance(method, str) else method,
        "parts": {"balanced_budget": {"budget": 100}, "semantic_calibration": {"acquire_iterations": 4}},
        "run": {"target": "rot45", "threads": 1, "output": str(output), "device": "cpu"},
    }
    table["run"]["checkpoint_every"] = 1  # by time, a test would see none of so short a run
    for section, values in sections.items():
        table[section] = {**table.get(section, {}), **values}
    return complete(from_table(table))


def tiny_experiment(output: Path | str, method: dict | str = "fedavg", rounds: int = 2, **sections: dict) -> Experiment:
    """The small experiment on half of the images with one small step a round; a run takes a tenth of a second."""
    data, train = {"fraction": 0.05, **sections.pop("data", {})}, {"iterations": 1, **sections.pop("train", {})}
    return small_experiment(output, method, data=data, train={"rounds": rounds, "batch_size": 8, **train}, **sections)


class Interrupt(RunCallback):
    """Callback that stops a run after a round, as Ctrl-C would."""

    def __init__(self, after_round: int) -> None:
        self.after_round = after_round

    def on_round(self, row: dict, clients: list[dict]) -> None:
        """Raise when the round is reached."""
        if row["round"] == self.after_round:
            raise KeyboardInterrupt


def run_small(experiment: Experiment, *callbacks: object, tamper: Callable | None = None) -> tuple[Path, SpyGrid]:
    """Run an experiment inline; returns its folder and the grid with all messages."""
    plan = resolve(experiment)
    grid = SpyGrid(len(plan.clients), tamper)
    return serve(grid, plan, callbacks), grid


def interrupt(experiment: Experiment, after_round: int) -> Path:
    """Run an experiment inline until Ctrl-C after this round; returns its folder."""
    with pytest.raises(KeyboardInterrupt):
        run_small(experiment, Interrupt(after_round))
    return run_folder(experiment)


def numbers(file: Path) -> pd.DataFrame:
    """A record file without its columns of times."""
    table = pd.read_csv(file)
    return table[[column for column in table if "seconds" not in column]]


def read_audit(file: Path) -> list[dict]:
    """The lines of a server's audit log; none without a file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def free_ports(count: int) -> list[int]:
    """Loopback ports that nothing listens on, all different."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
