"""The plan of a combination search: candidates, and for each unseen domain the cells of every rung and their scores.

For an unseen domain T, a fold leaves one source domain S out: a run on the data without T whose target is S. Nothing
reads an image of T before the outer run, in which the winner was chosen already.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedsim.common.errors import UserError, nearest
from fedsim.data import benchmark, resolve_domain, unseen_domains
from fedsim.methods.recipe import SLOTS
from fedsim.methods.variants import variant_words
from fedsim.results.record_files import read_record
from fedsim.run.plan import resolve
from fedsim.settings.experiment import Experiment, read_experiment
from fedsim.sweep.axes import Axes
from fedsim.sweep.combine import Option, draw_all, halve, options_in, stages, words_of
from fedsim.sweep.plan import Cell, Readers, plan_cells, readers, refusal_of
from fedsim.sweep.scores import ranking, validation_of


@dataclass(frozen=True)
class Combination:
    """What is searched, as the user gives it: the base method, its slots, and the number of candidates (`budget`)."""

    method: str
    targets: Sequence[str]
    seeds: Sequence[int]
    slots: Sequence[str]
    budget: int = 60
    seed: int = 0


@dataclass(frozen=True)
class Candidate:
    """Some options on the base method. words: the overrides; label: what they change, as in the names of folders."""

    number: int
    options: tuple[Option, ...]
    words: tuple[str, ...]
    label: str


@dataclass(frozen=True)
class Outcome:
    """What became of a candidate in one rung."""

    rung: int
    candidate: Candidate
    folds: tuple[str, ...]
    score: float | None
    text: str
    kept: bool


@dataclass
class Unseen:
    """The search for one unseen domain: its folds in their order, the candidates that are left, and the outcomes."""

    target: str
    folds: list[str]
    left: list[int]
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def last(self) -> dict[int, Outcome]:
        """{candidate: its outcome in the last rung that it reached}, the winner first and the first to drop last."""
        found = {outcome.candidate.number: outcome for outcome in self.outcomes}
        places = list(ranking({number: one.score for number, one in found.items()}))
        last = sorted(set(found) - set(places))  # without a score
        return {n: found[n] for n in sorted([*places, *last], key=lambda n: -found[n].rung)}


@dataclass
class PlannedCombination:
    """The candidates and the unseen domains, with the words with which the search was asked for."""

    config: str
    search: Combination
    base: Experiment
    candidates: list[Candidate]
    unseen: list[Unseen]
    refused: list[tuple[str, str]]
    overrides: Sequence[str]
    preset: str
    shared: Readers
    _cells: dict[tuple[int, str, str], list[Cell]] = field(default_factory=dict)

    @property
    def rungs(self) -> list[int]:
        """The number of folds in each rung, which is the same for all unseen domains."""
        return stages(len(self.unseen[0].folds))

    @property
    def most_runs(self) -> int:
        """The number of runs, all rungs together; fewer where candidates fail or repeat the numbers of others."""
        size, before, runs = len(self.candidates), 0, 0
        for folds in self.rungs:
            runs += size * (folds - before)
            size, before = math.ceil((size - 1) / 3) + 1, folds
        return runs * len(self.unseen) * len(set(self.search.seeds))

    def cells_of(self, number: int, target: str, fold: str) -> list[Cell]:
        """The cells of one candidate on one fold, one for each seed."""
        key = (number, target, fold)
        if key not in self._cells:
            words = [*self.overrides, *self.candidates[number].words, *without(self.base, target)]
            axes = Axes([self.search.method], [fold], self.search.seeds, [])
            self._cells[key] = plan_cells(self.config, axes, words, self.preset, self.shared)
        return self._cells[key]

    def cells(self, rung: int) -> list[Cell]:
        """All cells of a rung; those of the rungs before are among them."""
        return [
            cell
            for unseen in self.unseen
            for number in unseen.left
            for fold in unseen.folds[: self.rungs[rung]]
            for cell in self.cells_of(number, unseen.target, fold)
        ]

    def base_cells(self) -> list[Cell]:
        """The cells of the base on every fold, by which the folds are ordered."""
        return [cell for own in self.unseen for fold in own.folds for cell in self.cells_of(0, own.target, fold)]

    def order_folds(self) -> None:
        """The hardest fold first, by the base's records: on an easy one no candidate differs from the others."""
        for own in self.unseen:
            scores = {fold: self._score(0, own.target, [fold]) for fold in own.folds}
            own.folds.sort(key=lambda fold: math.inf if isinstance(scores[fold], str) else float(scores[fold]))

    def judge(self, rung: int) -> None:
        """Score the candidates of a rung by the records on disk, and keep the best third for the next one."""
        for unseen in self.unseen:
            folds = unseen.folds[: self.rungs[rung]]
            found = {number: self._score(number, unseen.target, folds) for number in unseen.left}
            found |= self._repeats(found, unseen.target, folds)
            scores = {number: None if isinstance(own, str) else own for number, own in found.items()}
            ordered = list(ranking(scores))
            last = rung == len(self.rungs) - 1
            kept = ordered[:1] if last else halve(scores)
            for number, own in found.items():
                said = own if isinstance(own, str) else f"rank {ordered.index(number) + 1} of {len(found)}"
                said += "" if number or last else ", the base"
                candidate = self.candidates[number]
                unseen.outcomes.append(Outcome(rung + 1, candidate, tuple(folds), scores[number], said, number in kept))
            unseen.left = kept

    def _repeats(self, found: Mapping[int, float | str], target: str, folds: Sequence[str]) -> dict[int, str]:
        """{candidate: why it is dropped} of those with the numbers of an earlier one in every round of every fold.

        Their changes do nothing here, as uniform weights do where all clients have equally many images.
        """
        first: dict[tuple[tuple[float, ...], ...], int] = {}
        repeats: dict[int, str] = {}
        for number in sorted(number for number, own in found.items() if not isinstance(own, str)):
            cells = [cell for fold in folds for cell in self.cells_of(number, target, fold)]
            same = first.setdefault(tuple(map(all_scores, cells)), number)
            repeats |= {number: f"the same numbers as candidate {same}"} if same != number else {}
        return repeats

    def _score(self, number: int, target: str, folds: Sequence[str]) -> float | str:
        """The mean over folds and seeds of the fold's metric, or the reason why a cell has none."""
        found = [fold_metric(cell) for fold in folds for cell in self.cells_of(number, target, fold)]
        reasons = [value for value in found if isinstance(value, str)]
        return reasons[0] if reasons else float(np.mean([value for value in found if not isinstance(value, str)]))


def without(base: Experiment, target: str) -> list[str]:
    """The overrides that take a domain out of the data, and its runs into an experiment of their own."""
    rest = [domain for domain in benchmark(base.data).domains if domain != target]
    name = f"{base.name}-without-{target}".replace("/", "_").replace("\\", "_")
    return [f"data.domains={json.dumps(rest)}", f"name={json.dumps(name)}"]


def fold_metric(cell: Cell) -> float | str:
    """The metric on the fold's domain at the round that the sources' validation selects, or why there is none."""
    found = validation_of(cell, on_target=True)
    return f"{found}: {cell.reason}" if cell.state == "failed" else found


def all_scores(cell: Cell) -> tuple[float, ...]:
    """What was measured on the fold's domain, and in validation, in every round."""
    rounds = read_record(cell.folder / "rounds.csv")
    columns = [name for name in rounds.select_dtypes("number") if name.startswith(("target_", "mean_"))]
    return tuple(rounds[columns].fillna(-1.0).to_numpy().ravel())


def plan_combinations(config: str, search: Combination, overrides: Sequence[str], preset: str) -> PlannedCombination:
    """The candidates, of which each is checked on the first fold; UserError for a search that cannot be."""
    for slot in search.slots:
        if slot not in SLOTS:
            raise UserError(f"--slots: no slot is called {slot!r}; {nearest(slot, SLOTS)}known: {', '.join(SLOTS)}")
    base = read_experiment(config, overrides, preset)
    search = dataclasses.replace(
        search, method=search.method or base.method_name, slots=list(dict.fromkeys(search.slots))
    )
    base = base.replace(method={"name": search.method})
    everywhere = unseen_domains(base.data)
    found = benchmark(base.data)
    targets = everywhere if list(search.targets) == ["all"] else [resolve_domain(found, t) for t in search.targets]
    if len(everywhere) < 3:
        raise UserError(f"{found.title} has {len(everywhere)} domains; a combination search needs three: the unseen "
                        "one, the one that a fold leaves out, and one to train on")  # fmt: skip
    unseen = [
        Unseen(target, [domain for domain in everywhere if domain != target], []) for target in dict.fromkeys(targets)
    ]
    plan = PlannedCombination(config, search, base, [], unseen, [], overrides, preset, readers())
    draw_candidates(plan)
    for own in unseen:
        own.left = [candidate.number for candidate in plan.candidates]
    return plan


def draw_candidates(plan: PlannedCombination) -> None:
    """Fill in the candidates of a plan, and what was refused with the reasons."""
    first = plan.unseen[0]
    words = [*without(plan.base, first.target), f"run.target={json.dumps(first.folds[0])}"]
    start = [*plan.overrides, f"method.name={plan.search.method}", *words]
    resolve(read_experiment(plan.config, start, plan.preset)).refuse_misfits()
    base = Candidate(0, (), (), variant_words(plan.base))
    labels = {base.label: 0}

    def checked(options: Sequence[Option]) -> tuple[list[str], str]:
        """(the overrides, what they change); UserError where the experiment refuses the parts."""
        own = words_of(options, plan.base)
        made = resolve(read_experiment(plan.config, [*start, *own], plan.preset))
        made.refuse_misfits()
        return own, variant_words(made.experiment)

    def accept(number: int, options: tuple[Option, ...]) -> Candidate | None:
        try:
            own, label = checked(options)
        except UserError as error:
            plan.refused.append((", ".join(option.text for option in options), str(error)))
            return None
        return Candidate(number, options, tuple(own), label) if labels.setdefault(label, number) == number else None

    slots = plan.search.slots
    offered, left_out = options_in(slots, plan.base, lambda options: refusal_of(lambda: checked(options)))
    if not offered:
        raise UserError(f"--slots {','.join(slots)}: no row of METHODS has another part for them here")
    plan.refused += left_out.items()
    plan.candidates += [base, *draw_all(offered, plan.search.seed, plan.search.budget, accept)]
