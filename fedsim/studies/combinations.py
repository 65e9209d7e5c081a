"""A search over combinations of parts: candidates, of which the best third goes on from rung to rung.

For an unseen domain T, a fold leaves one source domain S out: a run on the data without T whose target is S. Nothing
reads an image of T before the outer run, in which the winner was chosen already. Which candidates a rung has is decided
from the records on disk, so that the same command continues a search.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from rich.markup import escape
from rich.table import Column, Table

from fedsim.analysis.plots import plot_search
from fedsim.common.console import console, say
from fedsim.common.errors import UserError, nearest
from fedsim.common.files import atomic_write
from fedsim.common.tables import csv_text
from fedsim.data import benchmark, resolve_domain, unseen_domains
from fedsim.methods.listing import step_costs
from fedsim.methods.part_settings import typed
from fedsim.methods.recipe import SLOTS
from fedsim.records.record_files import read_record
from fedsim.runs.plan import results_folder
from fedsim.settings.experiment import Experiment, parse_override, read_experiment
from fedsim.studies.arms import Arm, arm_table, command, compare_command, plan_arm, plan_arms
from fedsim.studies.axes import Axes
from fedsim.studies.budget import Budget
from fedsim.studies.candidates import Base, Candidate, FirstFold, Options, without
from fedsim.studies.loop import carry_out
from fedsim.studies.plan import Cell, Readers, plan_cells, readers
from fedsim.studies.reports import given_settings, nested, percent, rows_of_others
from fedsim.studies.scores import halve, ranking, stages, validation_of
from fedsim.studies.search import refuse_less_is_better
from fedsim.studies.study import Study

NAMES = ("method", "search", "target")
COLUMNS = (*NAMES, "rung", "candidate", "changes", "slots", "folds", "score", "outcome")
CONFIRMED = 5  # fresh seeds in the commands of the outer run


@dataclass(frozen=True)
class Combination:
    """What is searched, as the user gives it: the base method, its slots, and the number of candidates (`budget`).

    confirm: the number of fresh seeds of the outer run; 0: only its commands are shown
    """

    method: str
    targets: Sequence[str]
    seeds: Sequence[int]
    slots: Sequence[str]
    budget: int = 60
    seed: int = 0
    confirm: int = 0


@dataclass(frozen=True)
class Outcome:
    """What became of a candidate in one rung."""

    rung: int
    candidate: Candidate
    folds: tuple[str, ...]
    score: float | None
    text: str
    is_kept: bool

    @property
    def score_text(self) -> str:
        """`28.3 % on 3 folds`"""
        return f"{percent(self.score or 0)} on {len(self.folds)} folds"

    def full_text(self, last_rung: int) -> str:
        """`kept: rank 3 of 60`, `dropped: diverged`, `winner: rank 1 of 7`."""
        if not self.is_kept:
            return f"dropped: {self.text}"
        return f"winner: {self.text}" if self.rung == last_rung else f"kept: {self.text}"


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
        outcomes = {outcome.candidate.number: outcome for outcome in self.outcomes}
        scores = {number: outcome.score for number, outcome in outcomes.items()}
        scored = list(ranking(scores))
        unscored = sorted(outcomes.keys() - set(scored))
        order = [*scored, *unscored]
        order.sort(key=lambda number: -outcomes[number].rung)
        return {number: outcomes[number] for number in order}


@dataclass
class CombinationSearch(Study):
    """The candidates and the unseen domains. Its steps are the base on every fold, the rungs, and the outer run.

    refused: (what was left out or drawn again, why)
    outer: {unseen domain: the arms of its outer run}, where that is run
    """

    base: Base
    search: Combination
    unseen: list[Unseen]
    candidates: list[Candidate]
    refused: list[tuple[str, str]]
    outer: dict[str, list[Arm]] = field(default_factory=dict)
    shared: Readers = field(default_factory=readers)
    step: int = -1  # 0: the base, then the rungs from 1 on; the step after the last rung is the outer run
    planned: dict[tuple[int, str, str], list[Cell]] = field(default_factory=dict)

    def ask(self) -> list[Cell]:
        self.step += 1
        if self.step == 0:
            return self.base_cells()
        if self.step <= len(self.rungs):
            return self.rung_cells(self.step - 1)
        return self.outer_cells() if self.step == len(self.rungs) + 1 else []

    def begin(self, dry_run: bool) -> None:
        if self.step == 0:
            say("the base on every fold, of which the rungs take the hardest first")
        elif self.step <= len(self.rungs):
            say(f"rung {self.step} of {len(self.rungs)}")

    def looks_beyond(self, cells: Sequence[Cell]) -> bool:
        is_known = self.step > len(self.rungs) or not any(cell.state == "waiting" for cell in cells)
        if not is_known:
            say("What comes later follows from the records of these cells.")
        return is_known

    def tell(self, cells: Sequence[Cell]) -> None:
        if self.step == 0:
            self.order_folds()
        elif self.step <= len(self.rungs):
            self.rank_candidates(self.step - 1)
        is_last = self.step == len(self.rungs)
        nobody_is_left = not any(unseen.left for unseen in self.unseen)
        if is_last or nobody_is_left:
            self.show_winners()

    @property
    def rungs(self) -> list[int]:
        """The number of folds in each rung, which is the same for all unseen domains."""
        return stages(len(self.unseen[0].folds))

    @property
    def most_runs(self) -> int:
        """The number of runs, all rungs together; fewer where candidates fail or repeat the numbers of others."""
        size = len(self.candidates)
        runs = 0
        before = 0
        for folds in self.rungs:
            runs += size * (folds - before)
            size = math.ceil((size - 1) / 3) + 1
            before = folds
        return runs * len(self.unseen) * len(set(self.search.seeds))

    def cells_of(
        self,
        number: int,
        target: str,
        folds: Sequence[str],
    ) -> list[Cell]:
        """Return the cells of one candidate on some folds, one for each fold and seed."""
        cells = []
        for fold in folds:
            key = (number, target, fold)
            if key not in self.planned:
                self.planned[key] = self._plan_fold(self.candidates[number], target, fold)
            cells += self.planned[key]
        return cells

    def _plan_fold(
        self,
        candidate: Candidate,
        target: str,
        fold: str,
    ) -> list[Cell]:
        base = self.base
        overrides = [*base.overrides, *candidate.overrides, *without(base.experiment, target)]
        axes = Axes([self.search.method], [fold], self.search.seeds, [])
        return plan_cells(base.config, axes, overrides, base.preset, self.shared)

    def base_cells(self) -> list[Cell]:
        """Return the cells of the base on every fold, by which the folds are ordered."""
        cells = []
        for unseen in self.unseen:
            cells += self.cells_of(0, unseen.target, unseen.folds)
        return cells

    def rung_cells(self, rung: int) -> list[Cell]:
        """Return all cells of a rung; those of the rungs before are among them."""
        cells = []
        for unseen in self.unseen:
            for number in unseen.left:
                cells += self.cells_of(number, unseen.target, unseen.folds[: self.rungs[rung]])
        return cells

    def outer_cells(self) -> list[Cell]:
        """Return the cells of the outer run, which has fresh seeds; none where it is not asked for."""
        cells = []
        for target, arms in self.outer.items():
            for arm in arms:
                cells += plan_arm(self.base, target, arm, self.fresh_seeds)
        return cells

    @property
    def fresh_seeds(self) -> list[int]:
        """Seeds that the search has not used, for the outer run or for its commands."""
        first = max(self.search.seeds) + 1
        return list(range(first, first + (self.search.confirm or CONFIRMED)))

    def order_folds(self) -> None:
        """Put the hardest fold first, by the base's records: on an easy one no candidate differs from the others."""
        for unseen in self.unseen:
            scores = {}
            for fold in unseen.folds:
                score = self._score(0, unseen.target, [fold])
                scores[fold] = math.inf if isinstance(score, str) else score
            unseen.folds.sort(key=scores.__getitem__)

    def rank_candidates(self, rung: int) -> None:
        """Score the candidates of a rung by the records on disk, and keep the best third for the next one."""
        is_last = rung == len(self.rungs) - 1
        for unseen in self.unseen:
            folds = unseen.folds[: self.rungs[rung]]
            results = {number: self._score(number, unseen.target, folds) for number in unseen.left}
            results |= self._repeats(results, unseen.target, folds)
            scores = {number: score_in(result) for number, result in results.items()}
            order = list(ranking(scores))
            unseen.left = order[:1] if is_last else halve(scores)
            for number, result in results.items():
                text = result if isinstance(result, str) else f"rank {order.index(number) + 1} of {len(results)}"
                if number == 0 and not is_last:
                    text += ", the base"
                outcome = Outcome(
                    rung + 1,
                    self.candidates[number],
                    tuple(folds),
                    scores[number],
                    text,
                    is_kept=number in unseen.left,
                )
                unseen.outcomes.append(outcome)

    def _repeats(
        self,
        results: Mapping[int, float | str],
        target: str,
        folds: Sequence[str],
    ) -> dict[int, str]:
        """{candidate: why it is dropped} of those with the numbers of an earlier one in every round of every fold.

        Their changes do nothing here, as uniform weights do where all clients have equally many images.
        """
        first: dict[tuple[tuple[float, ...], ...], int] = {}
        repeats: dict[int, str] = {}
        for number in sorted(results):
            if isinstance(results[number], str):
                continue
            curves = tuple(map(all_scores, self.cells_of(number, target, folds)))
            same = first.setdefault(curves, number)
            if same != number:
                repeats[number] = f"the same numbers as candidate {same}"
        return repeats

    def _score(
        self,
        number: int,
        target: str,
        folds: Sequence[str],
    ) -> float | str:
        """The mean over folds and seeds of the fold's metric, or the reason why a cell has none."""
        metrics = []
        for cell in self.cells_of(number, target, folds):
            metric = fold_metric(cell)
            if isinstance(metric, str):
                return metric
            metrics.append(metric)
        return float(np.mean(metrics))

    def show_winners(self) -> None:
        """Print the winner for every unseen domain, write all candidates, and plan the outer run if it is asked for."""
        for unseen in self.unseen:
            arms = show_winner(self, unseen)
            if arms and self.search.confirm:
                self.outer[unseen.target] = arms
        file = write_candidates(self)
        say(f"all candidates: {file}; their figure: {plot_search(file.parent)[-1].with_suffix('.png')}")


def score_in(result: float | str) -> float | None:
    """Return the score that a candidate has; None where it has a reason in place of one."""
    return None if isinstance(result, str) else result


def fold_metric(cell: Cell) -> float | str:
    """Return the metric on the fold's domain at the round that the sources' validation selects, or why it has none."""
    metric = validation_of(cell, on_target=True)
    return f"{metric}: {cell.reason}" if cell.state == "failed" else metric


def all_scores(cell: Cell) -> tuple[float, ...]:
    """Return what was measured on the fold's domain, and in validation, in every round."""
    rounds = read_record(cell.folder / "rounds.csv")
    columns = [name for name in rounds.select_dtypes("number") if name.startswith(("target_", "mean_"))]
    return tuple(rounds[columns].fillna(-1.0).to_numpy().ravel())


def plan_combinations(
    config: str,
    search: Combination,
    overrides: Sequence[str],
    preset: str,
) -> CombinationSearch:
    """Return the search with its candidates, each of which is checked on the first fold.

    Raises UserError for a slot or a domain that there is not, and for data with fewer than three domains.
    """
    slots = list(dict.fromkeys(search.slots))
    for slot in slots:
        if slot not in SLOTS:
            raise UserError(f"--slots: no slot is called {slot!r}; {nearest(slot, SLOTS)}known: {', '.join(SLOTS)}")
    experiment = read_experiment(config, overrides, preset)
    method = search.method or experiment.method_name
    search = dataclasses.replace(search, method=method, slots=slots)
    experiment = experiment.replace(method={"name": method})
    refuse_less_is_better(experiment)
    base = Base(config, experiment, overrides, preset)
    searches = unseen_of(base.experiment, search.targets)
    first_fold = FirstFold(base, searches[0].target, searches[0].folds[0])
    candidates = first_fold.draw(slots, search.seed, search.budget)
    for unseen in searches:
        unseen.left = [candidate.number for candidate in candidates]
    return CombinationSearch(base, search, searches, candidates, first_fold.refused)


def unseen_of(base: Experiment, names: Sequence[str]) -> list[Unseen]:
    """Return the unseen domains that are asked for (`["all"]`), each with all others as its folds.

    Raises UserError for a domain that there is not, and for data with fewer than three domains.
    """
    data = benchmark(base.data)
    domains = unseen_domains(base.data)
    targets = domains if list(names) == ["all"] else [resolve_domain(data, name) for name in names]
    if len(domains) < 3:
        raise UserError(f"{data.title} has {len(domains)} domains; a combination search needs three: the unseen "
                        "one, the one that a fold leaves out, and one to train on")  # fmt: skip
    searches = []
    for target in dict.fromkeys(targets):
        folds = [domain for domain in domains if domain != target]
        searches.append(Unseen(target, folds, []))
    return searches


def run_combinations(
    config: str,
    search: Combination,
    budget: Budget,
    *,
    overrides: Sequence[str] = (),
    preset: str = "",
    dry_run: bool = False,
) -> tuple[list[Cell], CombinationSearch]:
    """Run all rungs, print and write the winners, and run the outer run if it is asked for; (failed cells, search).

    Raises UserError for wrong input before any cell starts.
    """
    study = plan_combinations(config, search, overrides, preset)
    show_refused(study)
    folds = ", ".join(map(str, study.rungs))
    domains = ", ".join(unseen.target for unseen in study.unseen)
    say(f"{len(study.candidates)} candidates on {study.base.method} for {domains}; rungs with {folds} folds, and each "
        f"keeps the best third; at most {study.most_runs} runs")  # fmt: skip
    return carry_out(study, budget, dry_run), study


def show_refused(study: CombinationSearch) -> None:
    """Print the parts that are left out and the draws that were refused, with the reasons."""
    if study.refused:
        say(f"left out, or drawn again: {len(study.refused)}")
    for options, reason in study.refused:
        say(f"  {options}: {reason}")


def candidate_table(study: CombinationSearch, unseen: Unseen) -> Table:
    """Return all candidates of one unseen domain, the winner first, each with the last rung that it reached."""
    last = len(study.rungs)
    changes = Column("changes", overflow="fold")
    heading = f"candidates without {unseen.target}"
    table = Table("no.", changes, "rung", "folds", "score", "outcome", title=heading)
    for number, outcome in unseen.last.items():
        table.add_row(
            str(number),
            escape(outcome.candidate.title),
            f"{outcome.rung}/{last}",
            str(len(outcome.folds)),
            "" if outcome.score is None else percent(outcome.score),
            escape(outcome.full_text(last)),
        )
    return table


def show_winner(study: CombinationSearch, unseen: Unseen) -> list[Arm]:
    """Print the table, the winner in three forms, and the outer run; returns the arms of that run."""
    console.print(candidate_table(study, unseen))
    best = next(iter(unseen.last.values()), None)
    if best is None or not best.is_kept:
        say(f"{unseen.target}: no candidate has a score.")
        return []
    candidate = best.candidate
    line = f"best without {unseen.target}: {candidate.number} ({candidate.title}), {best.score_text}"
    of_base = unseen.last[0]
    if of_base.score is not None:
        line += f"; the base: {of_base.score_text}"
    say(line)
    if candidate.number == 0:
        say("No candidate is better than the base: nothing is to be changed.")
        return []
    values = dict(map(parse_override, candidate.overrides))
    say("\n" + tomli_w.dumps(nested(values)))
    settings = [f"--set {typed(key, value)}" for key, value in values.items()]
    say(" ".join(settings))
    return show_arms(study, unseen, candidate)


def show_arms(study: CombinationSearch, unseen: Unseen, winner: Candidate) -> list[Arm]:
    """Print the outer run as a table and as commands; returns its arms."""
    say("The score chose the winner, so that it is too favourable. The outer run, on fresh seeds and at the same cost:")
    single: Options = ()
    for outcome in unseen.last.values():
        options = outcome.candidate.options
        has_score = outcome.score is not None
        if has_score and len(options) == 1:
            single = options
            break
    arms = plan_arms(study.base, unseen.target, winner.options, single)
    console.print(arm_table(arms))
    say(f"cost of a step: {step_costs()[1]}; the costs of the parts are added, and an update multiplies them")
    for arm in arms:
        say(command(study.base, unseen.target, arm, study.fresh_seeds))
    say(compare_command(study.base, unseen.target, arms, study.fresh_seeds))
    return arms


def search_text(study: CombinationSearch) -> str:
    """Return the settings on which a search depends, by which its rows are told from those of another one."""
    search = study.search
    seeds = map(str, dict.fromkeys(search.seeds))
    texts = [
        f"slots {','.join(search.slots)}",
        f"budget {search.budget}",
        f"seeds {','.join(seeds)}",
        f"search seed {search.seed}",
        *given_settings(study.base.overrides, study.base.preset),
    ]
    return "; ".join(texts)


def rows_of(study: CombinationSearch, unseen: Unseen) -> list[dict[str, Any]]:
    """Return the rows of one unseen domain: each candidate in each rung, and in rung 0 what was left out and why."""
    common: dict[str, Any] = {"method": study.search.method, "search": search_text(study), "target": unseen.target}
    rows = []
    for outcome in unseen.outcomes:
        candidate = outcome.candidate
        row = {
            "rung": outcome.rung,
            "candidate": candidate.number,
            "changes": candidate.title,
            "slots": "+".join(option.slot for option in candidate.options),
            "folds": ",".join(outcome.folds),
            "score": outcome.score,
            "outcome": outcome.full_text(len(study.rungs)),
        }
        rows.append(common | row)
    for options, reason in study.refused:
        rows.append(common | {"rung": 0, "changes": options, "outcome": reason})
    return rows


def write_candidates(study: CombinationSearch) -> Path:
    """Write combinations.csv into the experiment's folder; the rows of other searches are kept."""
    file = results_folder(study.base.experiment) / "combinations.csv"
    rows = []
    for unseen in study.unseen:
        rows += rows_of(study, unseen)
    atomic_write(file, csv_text(COLUMNS, [*rows_of_others(file, NAMES, rows), *rows]))
    return file
