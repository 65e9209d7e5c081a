"""The plan of a search: each trial is a sweep of its own, with one value of every searched setting, and has a score.

The score comes from the source clients' validation alone. Nothing that was measured on the unseen domain is read here.
"""

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedsim.common.errors import UserError
from fedsim.common.seeding import stream_seed
from fedsim.common.tasks import TASKS, Task, task_of
from fedsim.data import find_dataset
from fedsim.results.record_files import read_record
from fedsim.results.selection import DEFAULT_RULE, select, validation_column
from fedsim.settings.experiment import Experiment, parse_override, read_experiment
from fedsim.sweep.axes import Axes, sweep_command
from fedsim.sweep.plan import PRUNED, Cell, Readers, plan_cells, readers
from fedsim.sweep.sampler import RANDOM, pruned_rounds, suggest
from fedsim.sweep.search import Knob, first_alike, points, ranking, score
from fedsim.sweep.search_space import find_space, own_values

NOT_RUN, DIVERGED = "not run", "diverged"
STARTUP = 10  # trials that are drawn at random before a sampler chooses, as many as Optuna has


@dataclass(frozen=True)
class Search:
    """What is searched, as the user gives it: one method, its targets (`["all"]`) and seeds, and the space."""

    method: str
    targets: Sequence[str]
    seeds: Sequence[int]
    space: Sequence[str]
    trials: int = 20
    seed: int = 0
    sampler: str = RANDOM
    pruner: str = ""


@dataclass
class Trial:
    """One point of the space and its cells.

    first: the number of the first trial with the same values
    measured: for each cell its validation, or the reason why it has none (`validation_of`)
    stopped: {place of a pruned cell: the round after which it is pruned}
    """

    number: int
    values: dict[str, str]
    first: int
    cells: list[Cell]
    measured: list[float | str] = field(default_factory=list)
    stopped: dict[int, int] = field(default_factory=dict)

    @property
    def score(self) -> float | None:
        """The mean validation of all cells; None when a cell has none."""
        return score([None if isinstance(value, str) else value for value in self.measured])

    @property
    def outcome(self) -> str:
        """Why the trial has no score; empty when it has one. A failure says more than a cell that has not been run."""
        reasons = [value for value in self.measured if isinstance(value, str)]
        return next((reason for reason in reasons if reason != NOT_RUN), reasons[0] if reasons else "")

    @property
    def sampler_value(self) -> float | None:
        """What a sampler gets of the trial: its score, 0 when it diverged, and nothing of one that failed."""
        return 0.0 if self.outcome == DIVERGED else self.score

    def count(self, state: str) -> int:
        """The number of cells in that state."""
        return sum(cell.state == state for cell in self.cells)


@dataclass
class PlannedSearch:
    """The trials of a search, with the values of the file's own settings and the words with which it was asked for."""

    config: str
    search: Search
    knobs: list[Knob]
    own: dict[str, Any]
    trials: list[Trial]
    overrides: Sequence[str]
    preset: str
    shared: Readers | None = None

    @property
    def cells(self) -> list[Cell]:
        """The cells of all trials; one that two trials share is there once."""
        return list({cell.folder: cell for trial in self.trials for cell in trial.cells}.values())

    @property
    def runs(self) -> list[Experiment]:
        """The experiments of trial 0."""
        return [cell.experiment for cell in self.trials[0].cells]

    @property
    def targets(self) -> list[str]:
        """The unseen domains."""
        return list(dict.fromkeys(run.run.target for run in self.runs))

    @property
    def ranked(self) -> list[Trial]:
        """The trials with a score, the best first; of trials with the same values only the first."""
        return [self.trials[number] for number in self.ranks]

    @property
    def ranks(self) -> dict[int, int]:
        """{trial: its rank} of those trials, in that order."""
        return ranking({trial.first: trial.score for trial in self.trials})

    def read(self) -> None:
        """Read what every cell has recorded so far, and plan the trials that follow from it."""
        for trial in self.trials:
            trial.measured = [validation_of(cell) for cell in trial.cells]
        every = points(self.knobs, self.search.trials, stream_seed(self.search.seed, self.search.method))
        known, random = len(self.trials), self.search.sampler == RANDOM
        if random and not self.search.pruner:
            self._plan(every[known:])
        elif known < STARTUP:
            self._plan(every[known:STARTUP])
        self._prune()
        if STARTUP <= len(self.trials) < len(every) and not any(trial.count("waiting") for trial in self.trials):
            self._plan([every[len(self.trials)] if random else self._suggested()])
            self._prune()

    def _prune(self) -> None:
        """Note which cells are pruned by what is recorded, and have the newest trial's looked at while they run."""
        if not self.search.pruner:
            return
        different = [trial for trial in self.trials if trial.first == trial.number]
        for place in range(len(different[0].cells)):
            curves = [_curve(trial.cells[place]) for trial in different]
            for trial, stop in zip(different, pruned_rounds(self.search.pruner, curves, STARTUP), strict=True):
                if stop is not None:
                    trial.cells[place].state = PRUNED
                    trial.measured = trial.measured or [NOT_RUN] * len(trial.cells)
                    trial.measured[place], trial.stopped[place] = f"pruned after round {stop}", stop
            newest = different[-1].cells[place]
            if newest.state == "waiting" and len(different) > STARTUP:
                newest.should_prune = functools.partial(_should_prune, self.search.pruner, curves[:-1], newest)

    def _suggested(self) -> dict[str, str]:
        """The next trial of a sampler, which depends on the trials so far alone."""
        search, number = self.search, len(self.trials)
        seed = stream_seed(search.seed, search.method, *self.targets, *map(str, search.seeds), number)
        earlier = [(self.typed(trial), trial.sampler_value) for trial in self.trials if trial.sampler_value is not None]
        return suggest(search.sampler, seed, self.knobs, earlier)

    def typed(self, trial: Trial) -> dict[str, Any]:
        """The values of a trial as an override gives them; those of trial 0 are the file's own."""
        return dict(parse_override(f"{key}={text}") for key, text in trial.values.items()) or self.own

    def _plan(self, drawn: Sequence[dict[str, str]]) -> None:
        """Add trials with their cells; trials with equal values, and equal recipes, share them."""
        every = [*(trial.values for trial in self.trials), *drawn]
        alike = first_alike(every, self.own)
        known = {cell.folder: cell for cell in self.cells}
        for number in range(len(self.trials), len(every)):
            point, first = every[number], alike[number]
            cells = self.trials[first].cells if first < number else self.cells_of(number, point)
            for cell in cells:
                other = known.setdefault(cell.folder, cell).experiment
                if other.model_copy(update={"method": cell.experiment.method}) != cell.experiment:
                    raise UserError(
                        f"trial {number} shares the folder {cell.folder} with another one; search other values"
                    )
            self.trials.append(Trial(number, point, first, [known[cell.folder] for cell in cells]))

    def cells_of(self, number: int, point: dict[str, str]) -> list[Cell]:
        """The cells of a new trial; those of trial 0 have the file's own values."""
        search, grid = self.search, [f"{key}={text}" for key, text in point.items()]
        axes = Axes([search.method], search.targets, search.seeds, grid)
        try:
            return plan_cells(self.config, axes, self.overrides, self.preset, self.shared)
        except UserError as error:
            if not point:
                raise
            raise UserError(f"trial {number} ({', '.join(grid)}): {error}") from None

    @property
    def folder(self) -> Path:
        """The experiment's folder."""
        return Path(self.runs[0].run.output) / self.runs[0].name

    @property
    def task(self) -> Task:
        """What the data set's models learn."""
        return TASKS[find_dataset(self.runs[0].data.dataset).task]

    def command(self, seeds: Sequence[int], values: dict[str, str]) -> str:
        """The sweep that runs the values of a trial with other seeds, in folders beside those of the search."""
        axes = Axes([self.search.method], self.targets, seeds, [f"{key}={text}" for key, text in values.items()])
        return sweep_command(self.config, axes, self.overrides, self.preset)


def plan_search(
    config: str, search: Search, overrides: Sequence[str], preset: str, shared: Readers | None = None
) -> PlannedSearch:
    """Every trial with its cells, all of them resolved and checked; UserError for settings that no trial may have.

    A sampler's trials are planned as far as they are known. shared: as in `plan_cells`
    """
    method = search.method or read_experiment(config, overrides, preset).method_name
    search = replace(search, method=method)
    experiment = read_experiment(config, [*overrides, f"method.name={method}"], preset)
    knobs = find_space(search.space, experiment, overrides)
    plan = PlannedSearch(config, search, knobs, {}, [], overrides, preset, shared or readers())
    target = plan.cells_of(0, {})[0].experiment.run.target
    words = [*overrides, f"method.name={method}", f"run.target={json.dumps(target, ensure_ascii=False)}"]
    plan.own = own_values(knobs, lambda *more: read_experiment(config, [*words, *more], preset))
    plan.read()
    return plan


def validation_of(cell: Cell, on_target: bool = False) -> float | str:
    """The validation of the round that `best_validation` selects, or the reason why the cell has none.

    on_target: the metric on the run's target in place of the validation, for a run whose target is a source domain

    A run in which a client failed has none either: a mean without the client of a hard domain is greater without a
    better model, so that such a trial could win.
    """
    rounds = read_record(cell.folder / "rounds.csv")
    if cell.state != "finished" or rounds.empty:
        return "failed" if cell.state == "failed" else NOT_RUN
    if "failed" in rounds and (rounds["failed"] > 0).any():
        return "a client failed"
    metric = task_of(rounds).metric
    column = validation_column(cell.experiment, metric)
    try:
        selected = select(rounds, DEFAULT_RULE, column)
    except UserError:  # NaN in every round
        return DIVERGED
    value = float(selected[f"target_{metric}" if on_target else column])
    return DIVERGED if math.isnan(value) else value


def _curve(cell: Cell) -> dict[int, float]:
    """{round: validation} as recorded so far."""
    rounds = read_record(cell.folder / "rounds.csv")
    if rounds.empty:
        return {}
    column = validation_column(cell.experiment, task_of(rounds).metric)
    known = rounds[rounds["round"] > 0]
    return dict(zip(known["round"].astype(int), known[column].astype(float), strict=True)) if column in known else {}


def _should_prune(pruner: str, curves: Sequence[dict[int, float]], cell: Cell) -> bool:
    return pruned_rounds(pruner, [*curves, _curve(cell)], STARTUP)[-1] is not None
