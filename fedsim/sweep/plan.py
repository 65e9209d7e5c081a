"""The cells of a sweep: which there are, which are done, and how long the others will take."""

import contextlib
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from fedsim.errors import UserError
from fedsim.experiment import Experiment, parse_override, read_experiment


@dataclass(frozen=True)
class Axes:
    """What a sweep varies; `targets` may be `["all"]`, `grid` holds `key=v1,v2` words."""

    methods: Sequence[str]
    targets: Sequence[str]
    seeds: Sequence[int]
    grid: Sequence[str] = ()


@dataclass
class Cell:
    """One run of a sweep and how far it is."""

    experiment: Experiment
    folder: Path
    state: str = "waiting"  # waiting, running, finished, failed
    round: int = 0
    target_accuracy: float | None = None
    reason: str = ""
    place: str = ""  # the machine, on a cluster
    started: float = 0.0  # seconds of time.monotonic
    heard: float = 0.0
    done_here: int = 0  # rounds of this sweep, without those of an earlier one

    @property
    def title(self) -> str:
        """method[@label] → target, seed."""
        run = self.experiment.run
        label = f"@{run.label}" if run.label else ""
        return f"{self.experiment.method_name}{label} → {run.target} (seed {run.seed})"

    @property
    def rounds_left(self) -> int:
        """Rounds that are still to be run."""
        return 0 if self.state in ("finished", "failed") else self.experiment.train.rounds - self.round

    def begin(self, place: str = "") -> None:
        """The cell has been given to a worker."""
        self.state, self.place, self.started = "running", place, time.monotonic()

    def hear(self, kind: str, value: Any, extra: Any) -> None:
        """Take a worker's ("round", number, accuracy), ("finished", "", None) or ("failed", reason, traceback)."""
        if kind == "round":
            self.done_here += value > 0  # round 0 only evaluates the initial model
            self.round, self.target_accuracy, self.heard = value, extra, time.monotonic()
            return
        self.state, self.reason = kind, value
        file = self.folder / "error.txt"
        with contextlib.suppress(OSError):  # the folder may be what is broken
            file.unlink(missing_ok=True)
            if extra:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(extra)
                self.reason += f" (traceback in {file})"


def plan_cells(config: str, axes: Axes, overrides: Sequence[str], preset: str) -> list[Cell]:
    """Every cell once with its settings resolved and checked; the ones with a summary are marked finished.

    UserError for settings that cannot run, and for a folder that holds a run with other settings.
    """
    from fedsim.data import benchmark
    from fedsim.results.callbacks import find_callback
    from fedsim.run.plan import resolve
    from fedsim.run.session import Fingerprints, is_finished, local_fingerprints, refuse_other_settings

    base = read_experiment(config, overrides, preset)
    for name in base.run.callbacks:
        find_callback(name)
    targets = benchmark(base.data).domains if list(axes.targets) == ["all"] else axes.targets
    cells: dict[Path, Cell] = {}
    seen: dict[str, Fingerprints] = {}  # the same data is read once for all cells

    def data_of(experiment: Experiment) -> Fingerprints:
        key = experiment.data.model_dump_json()
        if key not in seen:
            seen[key] = local_fingerprints(experiment)
        return seen[key]

    for method, values, target, seed in itertools.product(axes.methods, grid_points(axes.grid), targets, axes.seeds):
        words = [
            *overrides,
            f"method.name={method}",
            *values,
            f"run.target={target}",
            f"run.seed={seed}",
            f"run.label={label_of(values)}",
        ]
        plan = resolve(read_experiment(config, words, preset))
        experiment, folder = plan.experiment, plan.folder
        refuse_other_settings(folder, experiment, data_of)
        cell = Cell(experiment, folder, "finished" if is_finished(folder) else "waiting")
        if cells.setdefault(folder, cell).experiment != experiment:
            raise UserError(f"--grid {values[-1]}: two values share the folder {folder}; run them as two sweeps")
    return list(cells.values())


def label_of(values: Sequence[str]) -> str:
    """`guiding_head.weight=0.25,train.lr=0.1`: the grid's values as a part of a folder's name."""
    return ",".join(word.removeprefix("method.") for word in values).replace("/", "_")


def grid_points(grid: Sequence[str]) -> list[tuple[str, ...]]:
    """`["a=1,2", "b=x"]` -> `[("a=1", "b=x"), ("a=2", "b=x")]`; one empty point without a grid."""
    axes = []
    for axis in grid:
        key, _ = parse_override(axis)
        axes.append([f"{key}={value}" for value in split_values(axis.partition("=")[2])])
    return list(itertools.product(*axes))


def split_values(text: str) -> list[str]:
    """`1,[2,3],"a,b"` -> `1`, `[2,3]`, `"a,b"`: commas inside brackets and quotes belong to a value."""
    values, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        else:
            depth += (sign in "[{") - (sign in "]}")
        if sign == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += sign
    return [value.strip() for value in values]


def dry_table(cells: Sequence[Cell], width: int) -> Table:
    """The cells and, from rounds that are already on disk, an estimate of the time they will take."""
    table = Table("cell", "state", "rounds")
    for cell in cells:
        cell.round = rounds_on_disk(cell)
        shown = f"{cell.round}/" if cell.state == "waiting" and cell.round else ""
        table.add_row(cell.title, cell.state, f"{shown}{cell.experiment.train.rounds}")
    rates = measured_rates(cells)
    seconds = time_left(cells, rates, width or 1)
    if seconds is None:
        table.caption = "no finished rounds to estimate the time from"
    else:
        pace = ", ".join(f"{method} {rate:.2f} s" for method, rate in rates.items())
        at_a_time = f"{width} at a time" if width else "one at a time, divide by what the cluster carries"
        table.caption = f"about {duration(seconds)} from finished rounds ({pace} a round), {at_a_time}"
    return table


def rounds_on_disk(cell: Cell) -> int:
    """Rounds that an interrupted cell has recorded."""
    file = cell.folder / "rounds.csv"
    return max(file.read_bytes().count(b"\n") - 2, 0) if file.is_file() else 0


def measured_rates(cells: Sequence[Cell]) -> dict[str, float]:
    """Median seconds per round of each method over what the cells' folders already hold."""
    found: dict[str, list[float]] = {}
    for cell in cells:
        file = cell.folder / "rounds.csv"
        if file.is_file():
            seconds = pd.read_csv(file).get("round_seconds", pd.Series(dtype=float)).iloc[1:].dropna()
            found.setdefault(cell.experiment.method_name, []).extend(seconds)
    return {method: float(pd.Series(values).median()) for method, values in found.items() if values}


def observed_rates(cells: Sequence[Cell]) -> dict[str, float]:
    """Mean seconds per round of each method in this sweep, the start of a worker included."""
    found: dict[str, tuple[float, int]] = {}
    for cell in cells:
        if cell.done_here:
            seconds, rounds = found.get(cell.experiment.method_name, (0.0, 0))
            found[cell.experiment.method_name] = (seconds + cell.heard - cell.started, rounds + cell.done_here)
    return {method: seconds / rounds for method, (seconds, rounds) in found.items()}


def time_left(cells: Sequence[Cell], rates: Mapping[str, float], width: int) -> float | None:
    """Seconds until all cells have ended with `width` at a time, a method without a rate at the mean of the others.

    None without any rate.
    """
    if not rates:
        return None
    mean = sum(rates.values()) / len(rates)
    work = [cell.rounds_left * rates.get(cell.experiment.method_name, mean) for cell in cells]
    return max(sum(work) / width, max(work, default=0.0))


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
