"""A search over hyper-parameters: every trial is a grid of targets and seeds, with one value of each searched setting.

Trial 0 has the file's own values, and the others are drawn. The score of a trial comes from the source clients'
validation alone. Nothing that was measured on the unseen domain is read, shown or written here.
"""

import functools
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli_w
from rich.markup import escape
from rich.table import Table

from fedsim.common.console import console, say
from fedsim.common.errors import UserError
from fedsim.common.files import atomic_write
from fedsim.common.seeding import stream_seed
from fedsim.common.tables import csv_text
from fedsim.common.tasks import TASKS, Task
from fedsim.data.benchmarks import task_of_data
from fedsim.records.differences import short_names, value_text
from fedsim.records.selection import DEFAULT_RULE, primary_column, rule_title
from fedsim.settings.experiment import Experiment, read_experiment
from fedsim.studies.axes import Axes, sweep_command
from fedsim.studies.budget import Budget
from fedsim.studies.estimate import cell_table
from fedsim.studies.loop import carry_out
from fedsim.studies.plan import PRUNED, Cell, Readers, is_same_run, plan_cells, readers
from fedsim.studies.reports import given_settings, nested, percent, rows_of_others
from fedsim.studies.sampler import RANDOM, check_sampler, pruned_rounds, suggest
from fedsim.studies.scores import DIVERGED, NOT_RUN, curve_of, mean_score, ranking, validation_of
from fedsim.studies.space import Knob, find_space, first_alike, points, typed_values, values_in_file, without_space
from fedsim.studies.study import Study

STARTUP = 10  # trials that are drawn at random before a sampler chooses, as many as Optuna has
NEW_SEEDS = 3
NAMES = ("method", "search", "trial")
RESULTS = ("rank", "score", "scored_by", "outcome", "cells", "finished", "failed", "repeats")


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

    @property
    def is_random(self) -> bool:
        """Whether no sampler chooses the trials."""
        return self.sampler == RANDOM


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
        return mean_score(self.measured)

    @property
    def outcome(self) -> str:
        """Why the trial has no score; empty when it has one. A failure says more than a cell that has not been run."""
        reasons = [value for value in self.measured if isinstance(value, str)]
        failures = [reason for reason in reasons if reason != NOT_RUN]
        return next(iter([*failures, *reasons]), "")

    @property
    def score_for_sampler(self) -> float | None:
        """The score, 0 when the trial diverged, and None when it failed, of which a sampler does not learn."""
        return 0.0 if self.outcome == DIVERGED else self.score

    def count(self, state: str) -> int:
        """Return the number of cells in that state."""
        return sum(cell.state == state for cell in self.cells)

    def prune(self, place: int, last: int) -> None:
        """Note that the cell at a place of the trial is pruned after the round `last`."""
        self.cells[place].state = PRUNED
        if not self.measured:
            self.measured = [NOT_RUN] * len(self.cells)
        self.measured[place] = f"pruned after round {last}"
        self.stopped[place] = last


@dataclass
class PlannedSearch(Study):
    """The trials of a search, with the values of the file's own settings and what it was asked for with."""

    config: str
    search: Search
    knobs: list[Knob]
    file_values: dict[str, Any]
    trials: list[Trial]
    overrides: Sequence[str]
    preset: str
    shared: Readers | None = None
    asked: set[Path] = field(default_factory=set)  # the folders of the cells that were asked for

    is_blind = True

    def ask(self) -> list[Cell]:
        """Return the cells of the trials that are known; those of a sampler follow from the trials before them."""
        cells = [cell for cell in self.cells if cell.folder not in self.asked]
        self.asked |= {cell.folder for cell in cells}
        return cells

    def tell(self, cells: Sequence[Cell]) -> None:
        self.read()

    def table(self, cells: Sequence[Cell], width: int) -> Table:
        """Return the trials as far as they are finished, with an estimate of the time that the others take."""
        caption = plan_table([self], width).caption
        self.read()
        table = trial_table(self)
        table.caption = caption
        return table

    def report(self) -> None:
        write_trials([self])
        show_result(self)

    def read(self) -> None:
        """Read what every cell has recorded so far, and plan the trials that follow from it."""
        for trial in self.trials:
            trial.measured = [validation_of(cell) for cell in trial.cells]
        search = self.search
        seed = stream_seed(search.seed, search.method)
        drawn = points(self.knobs, search.trials, seed)
        is_fixed = search.is_random and not search.pruner
        at_once = len(drawn) if is_fixed else STARTUP
        self._add(drawn[len(self.trials) : at_once])
        self._prune()
        number = len(self.trials)
        is_waiting = any(trial.count("waiting") for trial in self.trials)
        if STARTUP <= number < len(drawn) and not is_waiting:
            point = drawn[number] if search.is_random else self._suggested()
            self._add([point])
            self._prune()

    def _prune(self) -> None:
        """Note which cells are pruned by what is recorded, and have the newest trial's looked at while they run."""
        pruner = self.search.pruner
        if not pruner:
            return
        different = different_trials(self)
        for place in range(len(different[0].cells)):
            curves = [curve_of(trial.cells[place]) for trial in different]
            last_rounds = pruned_rounds(pruner, curves, STARTUP)
            for trial, last in zip(different, last_rounds, strict=True):
                if last is not None:
                    trial.prune(place, last)
            newest = different[-1].cells[place]
            if newest.state == "waiting" and len(different) > STARTUP:
                newest.should_prune = functools.partial(_falls_behind, newest, pruner, curves[:-1])

    def _suggested(self) -> dict[str, str]:
        """The next trial of a sampler, which depends on the trials so far alone."""
        search, number = self.search, len(self.trials)
        seed = stream_seed(search.seed, search.method, *self.targets, *map(str, search.seeds), number)
        earlier = []
        for trial in self.trials:
            if trial.score_for_sampler is not None:
                values = typed_values(trial.values) or self.file_values
                earlier.append((values, trial.score_for_sampler))
        return suggest(search.sampler, seed, self.knobs, earlier)

    def _add(self, drawn: Sequence[dict[str, str]]) -> None:
        """Add trials with their cells; trials with equal values, and equal recipes, share them."""
        every = [*(trial.values for trial in self.trials), *drawn]
        alike = first_alike(every, self.file_values)
        planned = {cell.folder: cell for cell in self.cells}
        for number in range(len(self.trials), len(every)):
            first = alike[number]
            cells = self.trials[first].cells if first < number else self.cells_of(number, every[number])
            shared = []
            for cell in cells:
                other = planned.setdefault(cell.folder, cell)
                if not is_same_run(other, cell):
                    where = f"trial {number} shares the folder {cell.folder} with another one"
                    raise UserError(f"{where}; search other values")
                shared.append(other)
            self.trials.append(Trial(number, every[number], first, shared))

    def cells_of(self, number: int, point: dict[str, str]) -> list[Cell]:
        """Return the cells of a new trial; those of trial 0 have the file's own values.

        Raises UserError, with the values, for a trial that no cell can have.
        """
        grid = [f"{key}={text}" for key, text in point.items()]
        axes = Axes([self.search.method], self.search.targets, self.search.seeds, grid)
        try:
            return plan_cells(self.config, axes, self.overrides, self.preset, self.shared)
        except UserError as error:
            if not point:
                raise
            raise UserError(f"trial {number} ({', '.join(grid)}): {error}") from None

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
    def seeds(self) -> list[int]:
        """The seeds, each once."""
        return list(dict.fromkeys(self.search.seeds))

    @property
    def ranks(self) -> dict[int, int]:
        """{trial: its rank} of the trials with a score, the best first; of trials with the same values the first."""
        return ranking({trial.first: trial.score for trial in self.trials})

    @property
    def ranked(self) -> list[Trial]:
        """Those trials, in that order."""
        return [self.trials[number] for number in self.ranks]

    @property
    def folder(self) -> Path:
        """The experiment's folder."""
        return Path(self.runs[0].run.output) / self.runs[0].name

    @property
    def task(self) -> Task:
        """What the data set's models learn."""
        return TASKS[task_of_data(self.runs[0].data)]


def refuse_less_is_better(experiment: Experiment) -> None:
    """Raises UserError for a task whose metric a search would maximize although less of it is better."""
    task = TASKS[task_of_data(experiment.data)]
    if task.less_is_better:
        raise UserError("a search takes the greatest validation for the best, and less is better in the "
                        f"{task.title} of data.task = {task.name!r}; compare its settings with fedsim sweep --grid "
                        "and fedsim compare --by")  # fmt: skip


def _falls_behind(cell: Cell, pruner: str, curves: Sequence[dict[int, float]]) -> bool:
    """Whether a cell is to be pruned, by its own curve and those of the trials before it."""
    return pruned_rounds(pruner, [*curves, curve_of(cell)], STARTUP)[-1] is not None


def different_trials(plan: PlannedSearch) -> list[Trial]:
    """Return the trials whose values no earlier one has."""
    return [trial for trial in plan.trials if trial.first == trial.number]


def plan_search(
    config: str,
    search: Search,
    overrides: Sequence[str],
    preset: str,
    shared: Readers | None = None,
) -> PlannedSearch:
    """Return every trial with its cells, all of them resolved and checked.

    A sampler's trials are planned as far as they are known. Raises UserError for settings that no trial may have.

    shared: as in `plan_cells`
    """
    method = search.method or read_experiment(config, overrides, preset).method_name
    settings = [*overrides, f"method.name={method}"]
    experiment = read_experiment(config, settings, preset)
    refuse_less_is_better(experiment)
    knobs = find_space(search.space, experiment, overrides)
    for line in [] if search.space else without_space(experiment):
        say(line)
    plan = PlannedSearch(config, replace(search, method=method), knobs, {}, [], overrides, preset, shared or readers())
    target = plan.cells_of(0, {})[0].experiment.run.target
    settings.append(f"run.target={json.dumps(target, ensure_ascii=False)}")
    plan.file_values = values_in_file(knobs, lambda *more: read_experiment(config, [*settings, *more], preset))
    plan.read()
    return plan


def run_search(
    config: str,
    search: Search,
    budget: Budget,
    *,
    overrides: Sequence[str] = (),
    preset: str = "",
    dry_run: bool = False,
) -> list[Cell]:
    """Run all cells that are not finished, then print and write the ranking of the trials; returns the failed cells.

    Raises UserError for wrong input before any cell starts.
    """
    check_sampler(search.sampler, search.pruner)
    plan = plan_search(config, search, overrides, preset)
    keys = ", ".join(knob.key for knob in plan.knobs)
    targets = ", ".join(plan.targets)
    seeds = "seed " if len(plan.seeds) == 1 else "seeds "
    seeds += ", ".join(map(str, plan.seeds))
    rule = rule_title(DEFAULT_RULE, plan.runs)
    say(f"search over {keys}: {search.trials} trials of {plan.search.method} on {targets} with {seeds}, "
        f"scored by {rule}")  # fmt: skip
    say_without_effect(search)
    return carry_out(plan, budget, dry_run)


def say_without_effect(search: Search) -> None:
    """Print a line when there are too few trials for the sampler or the pruner of a search."""
    if search.trials <= STARTUP and (search.pruner or not search.is_random):
        say(f"--sampler and --pruner have no effect on {search.trials} draws: the first {STARTUP} are "
            "drawn at random and never pruned")  # fmt: skip


def plan_table(plans: Sequence[PlannedSearch], width: int) -> Table:
    """Return a table of the cells of searches; its caption estimates their time and counts the trials that follow."""
    table = cell_table([cell for plan in plans for cell in plan.cells], width)
    later = sum(plan.search.trials - len(plan.trials) for plan in plans)
    if later:
        table.caption = f"{table.caption}; {later} trials follow from the scores of these"
    return table


def trial_table(plan: PlannedSearch) -> Table:
    """Return the trials, the best first and those without a score last; nothing of the unseen domain is in it."""
    ranks = plan.ranks
    settings = short_names([knob.key for knob in plan.knobs])
    table = Table("rank", "trial", *map(escape, settings), f"validation {plan.task.title}", "cells finished")
    others = [trial for trial in different_trials(plan) if trial.number not in ranks]
    for trial in [*plan.ranked, *others]:
        table.add_row(
            str(ranks.get(trial.number, "")),
            str(trial.number) if trial.number else "0 (file)",
            *map(escape, values_of(plan, trial).values()),
            trial.outcome if trial.score is None else percent(trial.score),
            f"{trial.count('finished')}/{len(trial.cells)}",
        )
    return table


def values_of(plan: PlannedSearch, trial: Trial) -> dict[str, str]:
    """Return the values of a trial as text; those of trial 0 are the file's own."""
    return trial.values or {key: value_text(value) for key, value in plan.file_values.items()}


def show_result(plan: PlannedSearch) -> None:
    """Print the ranking, the settings of the best trial in two forms, and what its score does not say."""
    console.print(trial_table(plan))
    repeated = len(plan.trials) - len(different_trials(plan))
    if repeated:
        say(f"trials whose values an earlier one has, and which are not run again: {repeated}")
    say(f"all trials: {plan.folder / 'search.csv'}")
    if not plan.ranked:
        say("No trial has a score: each has a cell that failed, diverged or was not run.")
        return
    best = plan.ranked[0]
    show_best(best, plan.trials[0])
    for line in caveats(plan):
        say(line)
    last = max(plan.search.seeds)
    say(command(plan, range(last + 1, last + 1 + NEW_SEEDS), best.values))


def show_best(best: Trial, of_file: Trial) -> None:
    """Print the score of the best trial next to that of the file's own values, and its settings to paste."""
    line = f"best: trial {best.number}, {percent(best.score or 0.0)}"
    if best is of_file:
        say(line)
        say("These are the file's own values: nothing is to be changed.")
        return
    if of_file.score is not None:
        line += f"; the file's own values: {percent(of_file.score)}"
    say(line)
    say("\n" + tomli_w.dumps(nested(typed_values(best.values))))
    settings = [f"--set {shlex.quote(f'{key}={text}')}" for key, text in best.values.items()]
    say(" ".join(settings))


def caveats(plan: PlannedSearch) -> list[str]:
    """Return what the reader of a ranking must know, the reason for new seeds last."""
    lines = []
    if len(plan.targets) > 1:
        lines.append(
            "One setting is chosen for all targets. The images of each target validate the runs of the others; "
            "to keep a target unseen by the choice, too, search with --targets for it alone."
        )
    if len(plan.seeds) == 1:
        lines.append("With one seed, the differences between trials may be noise.")
    different = different_trials(plan)
    lines.append(
        f"The best of {len(different)} trials was chosen by its score, which is therefore too favourable. "
        "Run it with new seeds before you report it:"
    )
    return lines


def command(plan: PlannedSearch, seeds: Sequence[int], values: dict[str, str]) -> str:
    """Return the sweep that runs the values of a trial with other seeds, in folders next to those of the search."""
    grid = [f"{key}={text}" for key, text in values.items()]
    axes = Axes([plan.search.method], plan.targets, seeds, grid)
    return sweep_command(plan.config, axes, plan.overrides, plan.preset)


def search_text(plan: PlannedSearch) -> str:
    """Return the settings on which a search depends, by which its rows are told from those of another one."""
    texts = [knob.text for knob in plan.knobs]
    texts += [
        f"targets {','.join(plan.targets)}",
        f"seeds {','.join(map(str, plan.seeds))}",
        f"search seed {plan.search.seed}",
        *given_settings(plan.overrides, plan.preset),
    ]
    if not plan.search.is_random:
        texts.append(f"sampler {plan.search.sampler}")
    if plan.search.pruner:
        texts.append(f"pruner {plan.search.pruner}")
    return "; ".join(texts)


def trial_rows(plan: PlannedSearch) -> list[dict[str, Any]]:
    """Return the rows of search.csv, one per trial."""
    ranks, text = plan.ranks, search_text(plan)
    scored_by = primary_column(plan.runs[0], plan.task.metric)
    rows = []
    for trial in plan.trials:
        row: dict[str, Any] = {"method": plan.search.method, "search": text, "trial": trial.number}
        row |= values_of(plan, trial)
        row |= {
            "rank": ranks.get(trial.first),
            "score": trial.score,
            "scored_by": scored_by,
            "outcome": trial.outcome or "scored",
            "cells": len(trial.cells),
            "finished": trial.count("finished"),
            "failed": trial.count("failed"),
            "repeats": trial.first if trial.first != trial.number else None,
        }
        rows.append(row)
    return rows


def write_trials(plans: Sequence[PlannedSearch]) -> None:
    """Write search.csv into the experiment's folder, with the rows of all these searches in their order.

    The rows of other searches (with another method, space or setting) are kept. All rows are written at once, so that
    two processes that end together write the same file.
    """
    file = plans[0].folder / "search.csv"
    rows = [row for plan in plans for row in trial_rows(plan)]
    rows = [*rows_of_others(file, NAMES[:2], rows), *rows]
    settings: dict[str, None] = {}
    for row in rows:
        settings |= {key: None for key in row if key and key not in (*NAMES, *RESULTS)}
    columns = [*NAMES, *settings, *RESULTS]
    atomic_write(file, csv_text(columns, rows))
