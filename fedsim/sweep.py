"""Methods x targets x seeds x grid values: every cell is one run, finished ones are skipped, several run at a time."""

import itertools
import multiprocessing
import os
import statistics
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from fedsim.console import SweepView, console, errors
from fedsim.errors import UserError
from fedsim.experiment import Experiment, parse_experiment, parse_override, read_experiment


@dataclass
class Cell:
    """One run of a sweep."""

    experiment: Experiment
    folder: Path
    state: str = "waiting"  # waiting, running, finished, failed
    round: int = 0
    target_accuracy: float | None = None
    reason: str = ""

    @property
    def title(self) -> str:
        """method[@label] → target, seed."""
        run = self.experiment.run
        label = f"@{run.label}" if run.label else ""
        return f"{self.experiment.method_name}{label} → {run.target} (seed {run.seed})"


def run_sweep(
    config: str,
    methods: Sequence[str],
    targets: Sequence[str],
    seeds: Sequence[int],
    *,
    grid: Sequence[str] = (),
    jobs: int = 0,
    overrides: Sequence[str] = (),
    preset: str = "",
    dry_run: bool = False,
) -> list[Cell]:
    """Run all cells that are not finished; returns the failed ones. UserError before anything starts for bad input."""
    jobs = jobs or max(os.cpu_count() or 1, 1)
    cells = plan_cells(config, methods, targets, seeds, grid, overrides, preset, jobs)
    waiting = [cell for cell in cells if cell.state == "waiting"]
    finished = len(cells) - len(waiting)
    console.print(
        f"{len(cells)} cells, {finished} finished, {len(waiting)} to run, {min(jobs, len(waiting))} at a time"
    )
    if dry_run:
        console.print(dry_table(cells, jobs))
        return []
    if waiting:
        with SweepView(cells) as view:
            Pool(waiting, min(jobs, len(waiting)), view).run()
    failed = [cell for cell in cells if cell.state == "failed"]
    for cell in failed:
        errors.print(f"failed: {cell.title}: {cell.reason}", style="red", highlight=False, soft_wrap=True)
    return failed


def plan_cells(
    config: str,
    methods: Sequence[str],
    targets: Sequence[str],
    seeds: Sequence[int],
    grid: Sequence[str],
    overrides: Sequence[str],
    preset: str,
    jobs: int,
) -> list[Cell]:
    """Every cell with its settings resolved and checked; the ones with a summary are marked finished."""
    from fedsim.assembly import build_recipe
    from fedsim.data import benchmark
    from fedsim.server_app import complete
    from fedsim.session import is_finished, run_folder

    base = read_experiment(config, overrides, preset)
    if list(targets) == ["all"]:
        targets = benchmark(base.data).domains
    threads = base.run.threads or max((os.cpu_count() or 1) // jobs, 1)
    cells = []
    for method, values, target, seed in itertools.product(methods, grid_points(grid), targets, seeds):
        words = [
            *overrides,
            f"method.name={method}",
            *values,
            f"run.target={target}",
            f"run.seed={seed}",
            f"run.threads={threads}",
            f"run.label={','.join(word.removeprefix('method.') for word in values)}",
        ]
        experiment = complete(read_experiment(config, words, preset))
        build_recipe(experiment)
        folder = run_folder(experiment)
        cells.append(Cell(experiment, folder, "finished" if is_finished(folder) else "waiting"))
    return cells


def grid_points(grid: Sequence[str]) -> list[tuple[str, ...]]:
    """`["a=1,2", "b=x"]` -> `[("a=1", "b=x"), ("a=2", "b=x")]`; one empty point without a grid."""
    axes = []
    for axis in grid:
        key, _ = parse_override(axis)
        axes.append([f"{key}={value.strip()}" for value in axis.partition("=")[2].split(",")])
    return list(itertools.product(*axes))


def dry_table(cells: Sequence[Cell], jobs: int) -> Table:
    """The cells and, from rounds that are already on disk, an estimate of the time they will take."""
    table = Table("cell", "state", "rounds")
    for cell in cells:
        table.add_row(cell.title, cell.state, str(cell.experiment.train.rounds))
    seconds = measured_seconds(cells)
    if seconds is not None:
        rounds = sum(cell.experiment.train.rounds for cell in cells if cell.state == "waiting")
        minutes = seconds * rounds / jobs / 60
        table.caption = (
            f"about {minutes:.1f} minutes at {seconds:.2f} s per round (median of finished rounds), {jobs} at a time"
        )
    else:
        table.caption = "no finished rounds to estimate the time from"
    return table


def measured_seconds(cells: Sequence[Cell]) -> float | None:
    """Median seconds per round over what the cells' folders already hold."""
    files = [cell.folder / "rounds.csv" for cell in cells]
    medians = [pd.read_csv(file)["round_seconds"].iloc[1:].median() for file in files if file.is_file()]
    medians = [value for value in medians if value == value]
    return statistics.median(medians) if medians else None


class PipeCallback:
    """Tells the sweep's process how far a cell is."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def on_start(self, experiment: Experiment, folder: Path) -> None:
        """Nothing to tell."""

    def on_round(self, row: dict[str, Any], clients: list[dict[str, Any]]) -> None:
        """Round and target accuracy."""
        self._connection.send(("round", row["round"], row["target_accuracy"]))

    def on_end(self, summary: dict[str, Any]) -> None:
        """Nothing to tell: the end of the run says it."""


def worker(connection: Connection) -> None:
    """A worker process: takes settings, runs them, until it is told to stop. Imports stay warm between cells."""
    from fedsim.runtime.launch import launch

    while True:
        try:
            text = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        if text is None:
            return
        try:
            launch(parse_experiment(text), [PipeCallback(connection)])
            connection.send(("finished", "", None))
        except KeyboardInterrupt:
            return
        except UserError as error:
            connection.send(("failed", str(error), None))
        except Exception as error:
            connection.send(
                ("failed", f"{error}".splitlines()[0] if str(error) else type(error).__name__, traceback.format_exc())
            )


@dataclass
class Pool:
    """Worker processes that take cells one after the other; a worker that dies fails its cell and is replaced."""

    cells: list[Cell]
    size: int
    view: Any
    _busy: dict[Connection, tuple[Any, Cell]] = field(default_factory=dict)

    def run(self) -> None:
        """Run all cells; Ctrl-C ends the workers and leaves every cell resumable."""
        queue = list(self.cells)
        context = multiprocessing.get_context("spawn")
        idle: list[tuple[Any, Connection]] = []
        try:
            while queue or self._busy:
                while queue and len(self._busy) < self.size:
                    process, connection = idle.pop() if idle else self._start(context)
                    self._give(process, connection, queue.pop(0))
                for connection in wait(list(self._busy), timeout=0.5):
                    done = self._hear(connection)
                    if done is not None:
                        idle.append(done)
                self.view.update()
        finally:
            self._stop(idle)

    def _start(self, context: Any) -> tuple[Any, Connection]:
        ours, theirs = context.Pipe()
        process = context.Process(target=worker, args=(theirs,), daemon=False)
        process.start()
        theirs.close()
        return process, ours

    def _give(self, process: Any, connection: Connection, cell: Cell) -> None:
        cell.state = "running"
        self._busy[connection] = (process, cell)
        connection.send(cell.experiment.toml())

    def _hear(self, connection: Connection) -> tuple[Any, Connection] | None:
        """Take one message; the worker when it has become idle."""
        process, cell = self._busy[connection]
        try:
            kind, value, extra = connection.recv()
        except (EOFError, ConnectionResetError):
            process.join(timeout=5)
            cell.state, cell.reason = "failed", f"the worker process died (exit code {process.exitcode})"
            del self._busy[connection]
            return None
        if kind == "round":
            cell.round, cell.target_accuracy = value, extra
            return None
        cell.state, cell.reason = kind, value
        if extra:
            cell.folder.mkdir(parents=True, exist_ok=True)
            (cell.folder / "error.txt").write_text(extra)
            cell.reason += f" (traceback in {cell.folder / 'error.txt'})"
        del self._busy[connection]
        return process, connection

    def _stop(self, idle: list[tuple[Any, Connection]]) -> None:
        for process, connection in idle:
            connection.send(None)
            connection.close()
            process.join(timeout=10)
        for connection, (process, _) in self._busy.items():
            process.terminate()
            process.join(timeout=10)
            connection.close()
