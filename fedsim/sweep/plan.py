"""The cells of a sweep: all of them, those that are finished, and the time that the others will take."""

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pandas as pd
from rich.table import Table
from rich.text import Text

from fedsim.common.errors import PresetConflictError, UserError
from fedsim.data import find_data, unseen_domains
from fedsim.methods.listing import step_costs
from fedsim.results.record_files import read_record
from fedsim.settings import DataSettings
from fedsim.settings.experiment import Experiment, read_experiment
from fedsim.sweep.axes import Axes, check_axes, grid_points, label_of
from fedsim.sweep.budget import Budget

if TYPE_CHECKING:
    from fedsim.run.conflicts import DataOf
    from fedsim.run.plan import Plan

A = TypeVar("A")
B = TypeVar("B")

OF_NETWORK: Any = {"data": True, "model": True, "method": True, "parts": True, "train": {"dp_clip"}}  # and its checks

PRUNED = "pruned"
ENDED = ("finished", "failed", PRUNED)


class Readers(NamedTuple):
    """data_of: fingerprints of the data. misfit_of: why the network cannot have the parts, or an empty text."""

    data_of: "DataOf"
    misfit_of: Callable[["Plan"], str]


@dataclass
class Cell:
    """One run of a sweep, its state and its progress."""

    experiment: Experiment
    folder: Path
    state: str = "waiting"  # waiting, running, elsewhere (in another process), finished, failed, pruned
    round: int = 0
    target_accuracy: float | None = None
    reason: str = ""
    place: str = ""  # the name of the machine, on a cluster
    started: float = 0.0  # time.monotonic() at the start
    updated: float = 0.0  # time.monotonic() at the end of the latest round
    should_prune: Callable[[], bool] | None = None  # whether its records say that it is to be pruned
    done_here: int = 0  # rounds that this sweep has run; an earlier, interrupted sweep may have run others

    @property
    def title(self) -> str:
        """`METHOD[@changes and label] → TARGET (seed N)`; the first part is as in the path of the cell's folder."""
        run = self.experiment.run
        return f"{self.folder.parent.parent.name} → {run.target} (seed {run.seed})"

    @property
    def rounds_left(self) -> int:
        """Rounds that are still to be run."""
        return 0 if self.state in ENDED else self.experiment.train.rounds - self.round

    def begin(self, place: str = "") -> None:
        """Note that a worker has received the cell."""
        self.state, self.place, self.started = "running", place, time.monotonic()

    def note(self, kind: str, value: Any, extra: Any) -> None:
        """Note a message: ("round", number, accuracy), ("finished" or "pruned", "", None), or ("failed", reason,
        traceback)."""
        if kind == "round":
            self.done_here += value > 0  # round 0 only evaluates the initial model
            self.round, self.target_accuracy, self.updated = value, extra, time.monotonic()
            return
        self.state, self.reason = kind, value
        file = self.folder / "error.txt"
        with contextlib.suppress(OSError):  # the cell may have failed because its folder cannot be written
            file.unlink(missing_ok=True)
            if extra:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(extra)
                self.reason += f" (traceback in {file})"


def plan_cells(
    config: str, axes: Axes, overrides: Sequence[str], preset: str, shared: Readers | None = None
) -> list[Cell]:
    """Every cell once, with its settings resolved and checked; cells with a summary are marked finished.

    shared: the result of `readers`, for several plans that share their data and networks

    A cell is marked failed, with the reason, when its parts do not fit together (`a+b`) or do not fit its network. So
    it is when the preset replaces a part of its method, or when its folder holds a run with other settings or data. The
    other cells are run. Raises UserError for settings with which no cell could run.
    """
    from fedsim.results.callbacks import find_callback

    base = read_experiment(config, overrides, preset)
    for name in base.run.callbacks:
        find_callback(name)
    label = check_axes(axes, overrides, preset)
    targets = unseen_domains(base.data) if list(axes.targets) == ["all"] else axes.targets
    cells: dict[Path, Cell] = {}
    shared = shared or readers()
    for method, values, target, seed in itertools.product(axes.methods, grid_points(axes.grid), targets, axes.seeds):
        words = [
            *overrides,
            f"method.name={method}",
            *values,
            f"run.target={target}",
            f"run.seed={seed}",
            f"run.label={json.dumps(label_of(values, label), ensure_ascii=False)}",
        ]
        cell = _plan_cell(read_experiment(config, words, preset), shared)
        other = cells.setdefault(cell.folder, cell).experiment
        # Cells with the same folder have the same recipe; all their other settings must be equal too.
        if other.model_copy(update={"method": cell.experiment.method}) != cell.experiment:
            raise UserError(f"--grid {values[-1]}: two values share the folder {cell.folder}; run them as two sweeps")
    return list(cells.values())


def _plan_cell(experiment: Experiment, shared: Readers) -> Cell:
    """The cell of an experiment: waiting, finished, or failed with the reason."""
    from fedsim.run import admission
    from fedsim.run.plan import complete, folder_of, resolve

    try:
        plan = resolve(experiment)
        experiment = plan.experiment
    except UserError as error:
        if "+" not in experiment.method_name and not isinstance(error, PresetConflictError):
            raise
        experiment = complete(experiment)
        return Cell(experiment, folder_of(experiment, experiment.method_name), "failed", reason=str(error))
    try:
        if admission.earlier(plan, shared.data_of):
            return Cell(experiment, plan.folder, "finished")
    except UserError as error:
        return Cell(experiment, plan.folder, "failed", reason=str(error))
    misfit = shared.misfit_of(plan)
    return Cell(experiment, plan.folder, "failed" if misfit else "waiting", reason=misfit)


def readers() -> Readers:
    """What is read and built once for all cells that are planned with it."""
    from fedsim.run.conflicts import local_fingerprints, server_fingerprints

    local = once(local_fingerprints, lambda experiment: experiment.data.model_dump_json())
    return Readers(
        data_of=lambda experiment, recipe: (local(experiment), server_fingerprints(experiment, recipe)),
        misfit_of=once(
            lambda plan: refusal_of(plan.refuse_misfits),
            lambda plan: plan.experiment.model_dump_json(include=OF_NETWORK),
        ),
    )


def refusal_of(check: Callable[[], object]) -> str:
    """The text of the UserError that a check raises; empty without any."""
    try:
        check()
    except UserError as error:
        return str(error)
    return ""


def once(function: Callable[[A], B], key: Callable[[A], str]) -> Callable[[A], B]:
    """The function, which is called only once for arguments with the same key."""
    seen: dict[str, B] = {}

    def known(given: A) -> B:
        if (own := key(given)) not in seen:
            seen[own] = function(given)
        return seen[own]

    return known


def look_for_data(cells: Sequence[Cell], budget: Budget, dry_run: bool) -> None:
    """Mark the waiting cells failed whose data set is not on this machine; UserError when these are all of them.

    Nothing is marked before a dry run, and where the cells run elsewhere.
    """
    found = [] if dry_run or budget.remote else missing_data(cells)
    for cell, reason in found:
        if reason:
            cell.state, cell.reason = "failed", reason
    if found and all(reason for _, reason in found):
        raise UserError("; ".join(dict.fromkeys(reason for _, reason in found)))


def missing_data(cells: Sequence[Cell]) -> list[tuple[Cell, str]]:
    """(cell, why its data cannot be read here, or an empty text) of the waiting cells, except those of a deployment."""
    waiting = [cell for cell in cells if cell.state == "waiting" and cell.experiment.run.runtime != "deployment"]

    def lacks(data: DataSettings) -> str:
        return refusal_of(lambda: find_data(data))

    missing = once(lacks, DataSettings.model_dump_json)
    return [(cell, missing(cell.experiment.data)) for cell in waiting]


def dry_table(cells: Sequence[Cell], width: int) -> Table:
    """The cells and, from rounds that are already on disk, an estimate of the time they will take."""
    table = Table("cell", "state", "rounds")
    for cell in cells:
        cell.round = rounds_on_disk(cell)
        shown = f"{cell.round}/" if cell.state == "waiting" and cell.round else ""
        table.add_row(Text(cell.title), cell.state, f"{shown}{cell.experiment.train.rounds}")
    rates = measured_rates(cells)
    guessed, words = guessed_rates(cells, rates, step_costs()[0])
    seconds = time_left(cells, rates | guessed, width or 1)
    if seconds is None:
        table.caption = "no finished rounds to estimate the time from"
    else:
        pace = "; ".join([f"{', '.join(f'{name} {rate:.2f} s' for name, rate in rates.items())} a round", *words])
        at_a_time = f"{width} at a time" if width else "one at a time, divide by what the cluster carries"
        table.caption = f"about {duration(seconds)} from finished rounds ({pace}), {at_a_time}"
    return table


def rounds_on_disk(cell: Cell) -> int:
    """Rounds that an interrupted cell has recorded."""
    file = cell.folder / "rounds.csv"
    return max(file.read_bytes().count(b"\n") - 2, 0) if file.is_file() else 0


def measured_rates(cells: Sequence[Cell]) -> dict[str, float]:
    """Median seconds per round of each method over the rounds that the cells' folders already hold."""
    found: dict[str, list[float]] = {}
    for cell in cells:
        with contextlib.suppress(UserError):  # of a damaged file, which the cell's own run gives
            seconds = read_record(cell.folder / "rounds.csv").get("round_seconds", pd.Series(dtype=float))
            found.setdefault(cell.experiment.method_name, []).extend(seconds.iloc[1:].dropna())
    return {method: float(pd.Series(values).median()) for method, values in found.items() if values}


def guessed_rates(
    cells: Sequence[Cell], rates: Mapping[str, float], costs: Mapping[str, float]
) -> tuple[dict[str, float], list[str]]:
    """({method: seconds per round} of methods that still have rounds and no rate, a text about each of them).

    rates: seconds per round by method, as measured; costs: cost of a local step by method (`step_costs`).
    A round takes the mean of the measured seconds per unit of cost, times the method's cost; without a cost their mean.
    """
    left = dict.fromkeys(cell.experiment.method_name for cell in cells if cell.rounds_left)
    paces = [rate / costs[method] for method, rate in rates.items() if method in costs]
    likened = ("the mean of " if len(rates) > 1 else "") + ", ".join(rates)
    guessed, words = {}, []
    for method in (method for method in left if rates and method not in rates):
        if paces and method in costs:
            guessed[method] = costs[method] * sum(paces) / len(paces)
            words.append(f"{method} is not measured: {guessed[method]:.2f} s by the cost of its step")
        else:
            guessed[method] = sum(rates.values()) / len(rates)
            words.append(f"{method} is not measured: it is counted like {likened}")
    return guessed, words


def observed_rates(cells: Sequence[Cell]) -> dict[str, float]:
    """Mean seconds per round of each method in this sweep, including the start of a worker."""
    found: dict[str, tuple[float, int]] = {}
    for cell in cells:
        if cell.done_here:
            seconds, rounds = found.get(cell.experiment.method_name, (0.0, 0))
            found[cell.experiment.method_name] = (seconds + cell.updated - cell.started, rounds + cell.done_here)
    return {method: seconds / rounds for method, (seconds, rounds) in found.items()}


def time_left(cells: Sequence[Cell], rates: Mapping[str, float], width: int) -> float | None:
    """Seconds until all cells have ended when `width` of them run at a time; None without any rate.

    rates: seconds per round by method; a method that is not in it is given the mean of the others.
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
