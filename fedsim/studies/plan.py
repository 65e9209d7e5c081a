"""The cells of a study: their plan, and which of them are finished or cannot run."""

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fedsim.common.errors import PresetConflictError, UserError
from fedsim.data import find_data, unseen_domains
from fedsim.settings import DataSettings
from fedsim.settings.experiment import Experiment, read_experiment
from fedsim.studies.axes import Axes, check_axes, grid_points, label_of
from fedsim.studies.budget import Budget

if TYPE_CHECKING:
    from fedsim.runs.conflicts import DataOf
    from fedsim.runs.plan import Plan

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

    def note(
        self,
        kind: str,
        value: Any,
        extra: Any,
    ) -> None:
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
    config: str,
    axes: Axes,
    overrides: Sequence[str],
    preset: str,
    shared: Readers | None = None,
) -> list[Cell]:
    """Return every cell once, with its settings resolved and checked; cells with a summary are marked finished.

    shared: the result of `readers`, for several plans that share their data and networks

    A cell is marked failed, with the reason, when its parts do not fit together (`a+b`) or do not fit its network. So
    it is when the preset replaces a part of its method, or when its folder holds a run with other settings or data. The
    other cells are run. Raises UserError for settings with which no cell could run.
    """
    from fedsim.records.callbacks import find_callback

    base = read_experiment(config, overrides, preset)
    for name in base.run.callbacks:
        find_callback(name)
    label = check_axes(axes, overrides, preset)
    targets = unseen_domains(base.data) if list(axes.targets) == ["all"] else axes.targets
    shared = shared or readers()
    cells: dict[Path, Cell] = {}
    refused: dict[str, UserError] = {}
    for method, values, target, seed in itertools.product(axes.methods, grid_points(axes.grid), targets, axes.seeds):
        if method in refused:
            continue
        settings = [*overrides, f"method.name={method}", *values, f"run.target={target}", f"run.seed={seed}"]
        settings.append(f"run.label={json.dumps(label_of(values, label), ensure_ascii=False)}")
        try:
            cell = _plan_cell(read_experiment(config, settings, preset), values, shared)
        except UserError as error:
            refused[method] = error
            continue
        if not is_same_run(cells.setdefault(cell.folder, cell), cell):
            raise UserError(f"--grid {values[-1]}: two values share the folder {cell.folder}; run them as two sweeps")
    if refused:
        raise _refusal(refused, axes)
    return list(cells.values())


def _refusal(refused: Mapping[str, UserError], axes: Axes) -> UserError:
    """The first refusal and the names of all methods that are refused, so that one look at them is enough."""
    first, *others = refused
    if len(refused) == len(axes.methods):
        return refused[first]
    if any(axis.startswith("method.") for axis in axes.grid):
        alone = f"sweep {','.join(refused)} without this --grid into the same --output, and the other methods with it"
        return UserError(f"{refused[first]}; {alone}")
    if not others:
        return refused[first]
    return UserError(f"{refused[first]}; refused, too: {', '.join(others)}; leave them out of --methods")


def is_same_run(cell: Cell, other: Cell) -> bool:
    """Whether two cells with the same folder, and so with the same recipe, are equal in all other settings."""
    experiment = other.experiment
    return cell.experiment.model_copy(update={"method": experiment.method}) == experiment


def _plan_cell(experiment: Experiment, values: Sequence[str], shared: Readers) -> Cell:
    """The cell of an experiment: waiting, finished, or failed with the reason.

    values: those of the grid, of which a method that cannot be built has all in its folder's name
    """
    from fedsim.runs import admission
    from fedsim.runs.plan import complete, folder_of, resolve

    try:
        plan = resolve(experiment)
        experiment = plan.experiment
    except UserError as error:
        if "+" not in experiment.method_name and not isinstance(error, PresetConflictError):
            raise
        experiment = complete(experiment)
        of_method = ",".join(value for value in values if value.startswith("method."))
        folder = folder_of(experiment, f"{experiment.method_name}@{of_method}")
        return Cell(experiment, folder, "failed", reason=str(error))
    try:
        if admission.check_folder(plan, shared.data_of):
            return Cell(experiment, plan.folder, "finished")
    except UserError as error:
        return Cell(experiment, plan.folder, "failed", reason=str(error))
    misfit = shared.misfit_of(plan)
    return Cell(experiment, plan.folder, "failed" if misfit else "waiting", reason=misfit)


def readers() -> Readers:
    """What is read and built once for all cells that are planned with it."""
    from fedsim.runs.conflicts import local_fingerprints, server_fingerprints

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
    results: dict[str, B] = {}

    def call(argument: A) -> B:
        name = key(argument)
        if name not in results:
            results[name] = function(argument)
        return results[name]

    return call


def look_for_data(cells: Sequence[Cell], budget: Budget, dry_run: bool) -> None:
    """Mark the waiting cells failed whose data set is not on this machine; UserError when these are all of them.

    Nothing is marked before a dry run, and where the cells run elsewhere.
    """
    if dry_run or budget.remote:
        return
    looked_at = missing_data(cells)
    lacking = [(cell, reason) for cell, reason in looked_at if reason]
    for cell, reason in lacking:
        cell.state = "failed"
        cell.reason = reason
    if lacking and len(lacking) == len(looked_at):
        reasons = dict.fromkeys(reason for _, reason in lacking)
        raise UserError("; ".join(reasons))


def missing_data(cells: Sequence[Cell]) -> list[tuple[Cell, str]]:
    """(cell, why its data cannot be read here, or an empty text) of the waiting cells, except those of a deployment."""

    def reason_of(data: DataSettings) -> str:
        return refusal_of(lambda: find_data(data))

    reason = once(reason_of, DataSettings.model_dump_json)
    looked_at = []
    for cell in cells:
        if cell.state == "waiting" and cell.experiment.run.runtime != "deployment":
            looked_at.append((cell, reason(cell.experiment.data)))
    return looked_at


def rounds_on_disk(cell: Cell) -> int:
    """Return the number of rounds that an interrupted cell has recorded."""
    file = cell.folder / "rounds.csv"
    return max(file.read_bytes().count(b"\n") - 2, 0) if file.is_file() else 0  # without the header and round 0
