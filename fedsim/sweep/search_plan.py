"""The plan of a search: each trial is a sweep of its own, with one value of every searched setting, and has a score.

The score comes from the source clients' validation alone. Nothing that was measured on the unseen domain is read here.
"""

import functools
import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedsim.common.errors import UserError
from fedsim.common.seeding import stream_seed
from fedsim.common.tasks import task_of
from fedsim.methods.assembly import build_recipe
from fedsim.methods.part_settings import method_facts, parts_in
from fedsim.methods.recipe import LIST_SLOTS, SLOTS, Recipe, parts_of
from fedsim.parts.part import part_name
from fedsim.results.differences import ABSENT
from fedsim.results.record_files import read_record
from fedsim.results.selection import DEFAULT_RULE, select, validation_column
from fedsim.settings.experiment import Experiment, overlap, parse_override, read_experiment
from fedsim.settings.tuned import spaces
from fedsim.sweep.axes import OPTIONS, Axes
from fedsim.sweep.plan import Cell, plan_cells, readers
from fedsim.sweep.search import FORMS, Knob, first_alike, points, ranking, read_space, score

NOT_RUN = "not run"


@dataclass(frozen=True)
class Search:
    """What is searched, as the user gives it: one method, its targets (`["all"]`) and seeds, and the space."""

    method: str
    targets: Sequence[str]
    seeds: Sequence[int]
    space: Sequence[str]
    trials: int = 20
    seed: int = 0


@dataclass
class Trial:
    """One point of the space and its cells.

    first: the number of the first trial with the same values
    measured: for each cell its validation, or the reason why it has none (`validation_of`)
    """

    number: int
    values: dict[str, str]
    first: int
    cells: list[Cell]
    measured: list[float | str] = field(default_factory=list)

    @property
    def score(self) -> float | None:
        """The mean validation of all cells; None when a cell has none."""
        return score([None if isinstance(value, str) else value for value in self.measured])

    @property
    def outcome(self) -> str:
        """Why the trial has no score; empty when it has one. A failure says more than a cell that has not been run."""
        reasons = [value for value in self.measured if isinstance(value, str)]
        return next((reason for reason in reasons if reason != NOT_RUN), reasons[0] if reasons else "")

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
        """Read what every cell has recorded so far."""
        for trial in self.trials:
            trial.measured = [validation_of(cell) for cell in trial.cells]

    @property
    def folder(self) -> Path:
        """The experiment's folder."""
        return Path(self.runs[0].run.output) / self.runs[0].name

    def command(self, seeds: Sequence[int], values: dict[str, str]) -> str:
        """The sweep that runs the values of a trial with other seeds, in folders beside those of the search."""
        words = ["fedsim", "sweep", self.config, "--methods", self.search.method]
        words += ["--targets", ",".join(self.targets), "--seeds", ",".join(map(str, seeds))]
        words += ["--preset", self.preset] if self.preset else []
        for word in self.overrides:
            key, value = parse_override(word)
            words += ["--output", str(value)] if key == "run.output" else ["--set", word]
        words += [part for key, text in values.items() for part in ("--grid", f"{key}={text}")]
        return shlex.join(words)


def plan_search(config: str, search: Search, overrides: Sequence[str], preset: str) -> PlannedSearch:
    """Every trial with its cells, all of them resolved and checked; UserError for settings that no trial may have."""
    method = search.method or read_experiment(config, overrides, preset).method_name
    search = replace(search, method=method)
    space = search.space or declared_space(read_experiment(config, [*overrides, f"method.name={method}"], preset))
    knobs = [knob for knob in read_space(space) if search.space or not _given(knob, overrides)]
    if not knobs:
        raise UserError(f"--set leaves no declared setting of {method} open; a search needs a --space {FORMS}")
    _refuse_overridden(knobs, overrides)
    shared = readers()

    def cells_of(point: dict[str, str]) -> list[Cell]:
        axes = Axes([method], search.targets, search.seeds, [f"{key}={text}" for key, text in point.items()])
        return plan_cells(config, axes, overrides, preset, shared)

    target = cells_of({})[0].experiment.run.target
    words = [*overrides, f"method.name={method}", f"run.target={json.dumps(target, ensure_ascii=False)}"]
    read = functools.partial(_read, config, words, preset)
    own = own_values(knobs, read)
    trials = _plan_trials(points(knobs, search.trials, stream_seed(search.seed, method)), own, cells_of)
    return PlannedSearch(config, search, knobs, own, trials, overrides, preset)


def declared_space(experiment: Experiment) -> list[str]:
    """The spaces that [train] and the parts of a method declare (`settings/tuned.py`), as `--space` takes them."""
    recipe = build_recipe(experiment)
    facts = method_facts(recipe)
    found = {f"train.{name}": own for name, own in spaces(experiment.train, facts).items()}
    for _, part in parts_of(recipe):
        found |= {f"method.{part_name(part)}.{name}": own for name, own in spaces(part, facts).items()}
    return [f"{key}={own.space}" for key, own in found.items()]


def _given(knob: Knob, overrides: Sequence[str]) -> bool:
    """Whether `--set` gives a setting, also where it names a part in [parts]."""
    keys = [re.sub("^parts[.]", "method.", parse_override(word)[0]) for word in overrides]
    return any(overlap(knob.key, key) for key in keys)


def _refuse_overridden(knobs: Sequence[Knob], overrides: Sequence[str]) -> None:
    """UserError for a setting that is given in two ways."""
    for key, value in map(parse_override, overrides):
        if key in OPTIONS:
            option = OPTIONS[key].replace("--methods", "--method")
            raise UserError(f"--set {key}={value}: a search takes this from {option}; use {option} {value}")
        searched = [knob.text for knob in knobs if overlap(knob.key, key)]
        if searched:
            raise UserError(f"--space {searched[0]}: --set gives {key} one value too; remove one of the two")


def _read(config: str, words: Sequence[str], preset: str, *more: str) -> Experiment:
    return read_experiment(config, [*words, *more], preset)


def own_values(knobs: Sequence[Knob], read: Callable[..., Experiment]) -> dict[str, Any]:
    """The file's own value of each setting; UserError when the method lacks one, or when a space leaves its bounds."""
    from fedsim.run.plan import resolve

    for knob in knobs:
        try:
            for text in knob.ends:
                resolve(read(f"{knob.key}={text}"))
        except UserError as error:
            raise UserError(f"--space {knob.text}: {error}") from None
    plan = resolve(read())
    return {knob.key: _own_value(knob, plan.experiment, plan.recipe) for knob in knobs}


def _own_value(knob: Knob, experiment: Experiment, recipe: Recipe) -> Any:
    """The value that a setting has without the search, as an override would give it."""
    section, *path = knob.key.split(".")
    if section == "method" and path[0] in SLOTS:
        names = [part_name(part) for part in parts_in(recipe, path[0])]
        return names if path[0] in LIST_SLOTS else names[0] if names else "none"
    if section == "parts" or (section == "method" and len(path) > 1):
        present = {part_name(part): part for _, part in parts_of(recipe)}
        if path[0] not in present:
            raise UserError(f"--space {knob.text}: {experiment.method_name} has no part {path[0]!r}; it has: "
                            f"{', '.join(present)}")  # fmt: skip
        value = getattr(present[path[0]], path[1])
        return list(value) if isinstance(value, tuple) else value
    value = experiment.model_dump()[section]
    for name in path:
        value = value.get(name, ABSENT)
    return value


def _plan_trials(
    drawn: Sequence[dict[str, str]], own: dict[str, Any], cells_of: Callable[[dict[str, str]], list[Cell]]
) -> list[Trial]:
    """The trials with their cells; trials with equal values, and equal recipes, share them."""
    trials: list[Trial] = []
    known: dict[Path, Cell] = {}
    for number, (point, first) in enumerate(zip(drawn, first_alike(drawn, own))):
        cells = trials[first].cells if first < number else _cells(number, point, cells_of)
        for cell in cells:
            other = known.setdefault(cell.folder, cell).experiment
            if other.model_copy(update={"method": cell.experiment.method}) != cell.experiment:
                raise UserError(f"trial {number} shares the folder {cell.folder} with another one; search other values")
        trials.append(Trial(number, point, first, [known[cell.folder] for cell in cells]))
    return trials


def _cells(number: int, point: dict[str, str], cells_of: Callable[[dict[str, str]], list[Cell]]) -> list[Cell]:
    try:
        return cells_of(point)
    except UserError as error:
        if not point:
            raise
        words = ", ".join(f"{key}={text}" for key, text in point.items())
        raise UserError(f"trial {number} ({words}): {error}") from None


def validation_of(cell: Cell) -> float | str:
    """The validation of the round that `best_validation` selects, or the reason why the cell has none.

    A run in which a client failed has none either: a mean without the client of a hard domain is greater without a
    better model, so that such a trial could win.
    """
    rounds = read_record(cell.folder / "rounds.csv")
    if cell.state != "finished" or rounds.empty:
        return "failed" if cell.state == "failed" else NOT_RUN
    if "failed" in rounds and (rounds["failed"] > 0).any():
        return "a client failed"
    column = validation_column(cell.experiment, task_of(rounds).metric)
    try:
        return float(select(rounds, DEFAULT_RULE, column)[column])
    except UserError:  # NaN in every round
        return "diverged"
