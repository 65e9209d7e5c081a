"""DomainBed's protocol of tuning: draws of every method, of which the best counts for each unseen domain and trial.

The choice for a method, an unseen domain and a trial is a search of its own (`search.py`), scored by the validation of
the sources. A draw belongs to its method and number, so that these searches have the same draws at random.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.markup import escape
from rich.table import Table

from fedsim.analysis.statistics import comparable, grid_of, mean_and_std, per_seed_average
from fedsim.common.console import console, say
from fedsim.common.errors import UserError
from fedsim.common.files import atomic_write
from fedsim.common.tables import MISSING, csv_text, percent
from fedsim.data import unseen_domains
from fedsim.data.benchmarks import AVERAGE
from fedsim.records.record_files import is_finished, read_record
from fedsim.records.selection import DEFAULT_RULE, RULE_TITLES, rule_title
from fedsim.settings.experiment import read_experiment
from fedsim.studies.budget import Budget
from fedsim.studies.loop import carry_out
from fedsim.studies.plan import Cell, readers
from fedsim.studies.reports import rows_of_others
from fedsim.studies.sampler import RANDOM, check_sampler
from fedsim.studies.scores import ranking
from fedsim.studies.search import (
    PlannedSearch,
    Search,
    Trial,
    different_trials,
    plan_search,
    plan_table,
    say_without_effect,
    search_text,
    values_of,
    write_trials,
)
from fedsim.studies.study import Study

FILE = "tuned.csv"
NEAR = 0.01  # of validation: draws that are at most so much below the best one say how flat the choice was
FEW = 4  # different values that a table lists one by one
ORACLE = "oracle"


@dataclass(frozen=True)
class Draws:
    """What is tuned, as the user gives it. seeds: one for each trial; draws: their number, the first is the file's."""

    methods: Sequence[str]
    targets: Sequence[str]
    seeds: Sequence[int]
    draws: int = 20
    sampler: str = RANDOM
    pruner: str = ""


class TunedMethods(Study):
    """The searches of all methods, unseen domains and trials, which are run together.

    select: the rule under which the choices are shown, too, besides `best_validation`
    """

    is_blind = True

    def __init__(self, plans: Sequence[PlannedSearch], select: str) -> None:
        self.plans, self.select = plans, select

    def ask(self) -> list[Cell]:
        return [cell for plan in self.plans for cell in plan.ask()]

    def tell(self, cells: Sequence[Cell]) -> None:
        for plan in self.plans:
            plan.tell(cells)

    def table(self, cells: Sequence[Cell], width: int) -> Table:
        """Return the cells of all draws; of one choice alone it is the table of its draws."""
        if len(self.plans) == 1:
            return self.plans[0].table(cells, width)
        return plan_table(self.plans, width)

    def report(self) -> None:
        rows = [tuned_row(plan) for plan in self.plans]
        file = write_tuned(self.plans, rows)
        title = rule_title(DEFAULT_RULE, self.plans[0].runs)
        console.print(tuned_table(rows, title), values_table(self.plans, rows))
        say(f"±: sample deviation over trials. near: draws at most {100 * NEAR:g} point of validation below the best; "
            "spread: points from the median draw to the best. Both say how flat the choice was.")  # fmt: skip
        say(f"all choices: {file}; all draws: {file.with_name('search.csv')}")
        if self.select != DEFAULT_RULE:
            selected = [tuned_row(plan, self.select) for plan in self.plans]
            console.print(tuned_table(selected, RULE_TITLES[self.select]))
            say("ORACLE: draw and round were chosen on the unseen domain's labels. An upper bound, not a result.")


def plan_draws(
    config: str,
    draws: Draws,
    overrides: Sequence[str],
    preset: str,
) -> list[PlannedSearch]:
    """Return a search for every method, unseen domain and trial; UserError as in `plan_search`."""
    targets = draws.targets
    if list(targets) == ["all"]:
        targets = unseen_domains(read_experiment(config, overrides, preset).data)
    shared = readers()
    plans = []
    axes = itertools.product(dict.fromkeys(draws.methods), dict.fromkeys(targets), dict.fromkeys(draws.seeds))
    for method, target, seed in axes:
        search = Search(
            method,
            targets=[target],
            seeds=[seed],
            space=(),
            trials=draws.draws,
            sampler=draws.sampler,
            pruner=draws.pruner,
        )
        plans.append(plan_search(config, search, overrides, preset, shared))
    return plans


def run_draws(
    config: str,
    draws: Draws,
    budget: Budget,
    *,
    overrides: Sequence[str] = (),
    preset: str = "",
    dry_run: bool = False,
    select: str = DEFAULT_RULE,
) -> list[Cell]:
    """Run all draws that are not finished, then print the table of the chosen ones; returns the failed cells.

    Raises UserError for wrong input before any cell starts.
    """
    if select not in (DEFAULT_RULE, ORACLE):
        raise UserError(f"--select {select}: draws are chosen by {DEFAULT_RULE}, or besides it by oracle")
    check_sampler(draws.sampler, draws.pruner)
    plans = plan_draws(config, draws, overrides, preset)
    rule = rule_title(DEFAULT_RULE, plans[0].runs)
    say(f"{draws.draws} draws of {', '.join(draws.methods)} for {len(plans)} choices by {rule}")
    say_without_effect(plans[0].search)
    return carry_out(TunedMethods(plans, select), budget, dry_run)


def chosen_trial(plan: PlannedSearch, rule: str = DEFAULT_RULE) -> Trial | None:
    """Return the draw that counts: the first of those with the best score; None where no draw has a score.

    Under the rule `oracle` it is the first of those with the best metric on the unseen domain.
    """
    if rule == DEFAULT_RULE:
        return plan.ranked[0] if plan.ranked else None
    on_target = {}
    column = target_column(plan, rule)
    for trial in plan.ranked:
        value = float(summary_of(trial).get(column, np.nan))
        on_target[trial.number] = None if np.isnan(value) else value
    best = next(iter(ranking(on_target)), None)
    return None if best is None else plan.trials[best]


def tuned_row(plan: PlannedSearch, rule: str = DEFAULT_RULE) -> dict[str, Any]:
    """Return the row of one choice: what was chosen, its result, that of the file's own values, and its cost."""
    run, metric, column = plan.runs[0].run, plan.task.metric, target_column(plan, rule)
    trial = chosen_trial(plan, rule)
    untuned = summary_of(plan.trials[0])
    different = different_trials(plan)
    return {
        "method": plan.search.method,
        "search": search_text(plan),
        "target": run.target,
        "seed": run.seed,
        "draw": trial.number if trial else None,
        "values": values_text(plan, trial) if trial else None,
        **flatness_columns(plan, different),
        "draws": len(different),
        f"target_{metric}": summary_of(trial).get(column) if trial else None,
        f"untuned_target_{metric}": untuned.get(column),
        "steps": sum(steps_of(draw) for draw in different),
        "untuned_steps": untuned.get("steps"),
        "run": trial.cells[0].folder.relative_to(plan.folder).as_posix() if trial else None,
    }


def values_text(plan: PlannedSearch, trial: Trial) -> str:
    """Return the values of a draw as one text: `train.lr=0.1; train.batch_size=8`."""
    return "; ".join(f"{key}={value}" for key, value in values_of(plan, trial).items())


def flatness_columns(plan: PlannedSearch, different: Sequence[Trial]) -> dict[str, Any]:
    """Return the score of the choice next to those of the other draws, whatever rule selects the draw that is shown."""
    choice = chosen_trial(plan)
    scores = np.array([trial.score for trial in different if trial.score is not None])
    if choice is None or not len(scores):
        return {"score": None, "median_score": None, "near": None, "scored": len(scores)}
    near = comparable(scores) >= comparable(scores.max() - NEAR)
    return {
        "score": choice.score,
        "median_score": float(np.median(scores)),
        "near": int(near.sum()),
        "scored": len(scores),
    }


def summary_of(trial: Trial) -> dict[str, Any]:
    """Return the summary of a draw's run; empty without one.

    The folder of a failed cell may hold a run with other settings.
    """
    cell = trial.cells[0]
    if cell.state == "failed":
        return {}
    rows = read_record(cell.folder / "summary.csv")
    return {} if rows.empty else dict(rows.iloc[0])


def steps_of(trial: Trial) -> float:
    """Return the steps of a draw; of one that was pruned those until then, whenever its process was ended."""
    cell = trial.cells[0]
    if cell.state == "failed" and is_finished(cell.folder):
        return 0  # it is a run with other settings
    rounds = read_record(cell.folder / "rounds.csv")
    if 0 in trial.stopped:
        is_counted = rounds["round"] <= trial.stopped[0]
        return rounds["steps"][is_counted].sum()
    in_summary = summary_of(trial).get("steps")
    if in_summary or rounds.empty:
        return in_summary or 0
    return rounds["steps"].sum()


def target_column(plan: PlannedSearch, rule: str) -> str:
    """Return the column of a summary that holds the metric on the unseen domain under a rule."""
    return f"{rule}_target_{plan.task.metric}"


def write_tuned(plans: Sequence[PlannedSearch], rows: Sequence[dict[str, Any]]) -> Path:
    """Write search.csv with all draws and tuned.csv with the choices into one folder; returns tuned.csv.

    The rows of other searches (with another method, space or setting) are kept in both.
    """
    write_trials(plans)
    file = plans[0].folder / FILE
    others = rows_of_others(file, ("method", "search"), rows)
    atomic_write(file, csv_text(list(rows[0]), [*others, *rows]))
    return file


def tuned_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Return methods and unseen domains: mean and deviation over trials of the chosen draws, and the choice's cost."""
    (metric,) = (name for name in rows[0] if name.startswith("target_"))
    frame = pd.DataFrame(rows).rename(columns={"method": "label"})
    tuned = frame.assign(accuracy=frame[metric].astype(float))
    untuned = frame.assign(accuracy=frame[f"untuned_{metric}"].astype(float))
    targets = list(dict.fromkeys(frame["target"]))
    columns = ["method", *map(escape, targets), AVERAGE, "untuned", "near", "spread", "steps"]
    table = Table(*columns, title=title)
    for label in dict.fromkeys(frame["label"]):
        grid = grid_of(tuned, label).reindex(columns=targets)
        average = per_seed_average(grid, targets)
        untuned_average = per_seed_average(grid_of(untuned, label), targets)
        choices = frame[frame["label"] == label]
        table.add_row(
            escape(label),
            *(mean_text(grid[target]) for target in targets),
            mean_text(average),
            mean_text(untuned_average),
            *flatness_texts(choices),
            price_text(choices),
        )
    return table


def mean_text(values: pd.Series) -> str:
    """Return mean and deviation in percent: `65.0 ± 7.1`, of one value without a deviation."""
    statistics = mean_and_std(values)
    mean = percent(statistics["mean"])
    return mean if math.isnan(statistics["std"]) else f"{mean} ± {percent(statistics['std'])}"


def flatness_texts(choices: pd.DataFrame) -> tuple[str, str]:
    """Return `6.5 of 20`, and the distance in points from the median draw's validation to that of the best."""
    scored = choices.dropna(subset=["score"])
    if scored.empty:
        return MISSING, MISSING
    near = scored["near"].astype(float).mean()
    count = scored["scored"].mean()
    above_median = (scored["score"] - scored["median_score"]).astype(float)
    spread = 100 * above_median.mean()
    return f"{near:.1f} of {count:g}", f"{spread:.1f}"


def price_text(choices: pd.DataFrame) -> str:
    """Return all steps of all draws, and how many times those of the untuned runs they are: `80 (4.0 x)`."""
    steps = choices["steps"].sum()
    untuned = choices["untuned_steps"].dropna().astype(float).sum()
    text = f"{steps:,.0f}"
    if untuned:
        text += f" ({steps / untuned:.1f} x)"
    return text


def values_table(plans: Sequence[PlannedSearch], rows: Sequence[dict[str, Any]]) -> Table:
    """Return the chosen values of every drawn setting of a method, over its unseen domains and trials."""
    untuned: dict[tuple[str, str], str] = {}  # by method and setting
    chosen: dict[tuple[str, str], list[str]] = {}
    for plan, row in zip(plans, rows):
        number = row["draw"]
        if number is None:
            continue
        of_file = values_of(plan, plan.trials[0])
        of_draw = values_of(plan, plan.trials[number])
        for key, value in of_draw.items():
            setting = (plan.search.method, key)
            untuned.setdefault(setting, of_file[key])
            chosen.setdefault(setting, []).append(value)
    table = Table("method", "setting", "untuned", "chosen", title="chosen values")
    for setting, values in chosen.items():
        texts = [*setting, untuned[setting], counts_text(values)]
        table.add_row(*map(escape, texts))
    return table


def counts_text(values: Sequence[str]) -> str:
    """Return `0.1 (4), 0.01 (2)`, or the least, the median and the greatest of many different numbers."""
    counts = Counter(values).most_common()
    if len(counts) <= FEW:
        return ", ".join(f"{value} ({count})" for value, count in counts)
    numbers = pd.Series([float(value) for value in values])
    return f"{numbers.min():.4g} to {numbers.max():.4g}, median {numbers.median():.4g}"
