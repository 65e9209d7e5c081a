"""Runs draws of several methods, and shows the table of the chosen ones."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pandas as pd
from rich.markup import escape
from rich.table import Table

from fedsim.common.console import console, say
from fedsim.common.errors import UserError
from fedsim.data.benchmarks import AVERAGE
from fedsim.results.cell_texts import MISSING, percent
from fedsim.results.selection import DEFAULT_RULE, RULE_TITLES, rule_title
from fedsim.results.statistics import grid_of, mean_and_std, per_seed_average
from fedsim.sweep.budget import Budget
from fedsim.sweep.draws import NEAR, Draws, plan_draws, tuned_row, write_tuned
from fedsim.sweep.plan import Cell
from fedsim.sweep.sampler import check_sampler
from fedsim.sweep.search_plan import PlannedSearch
from fedsim.sweep.search_run import run_plans
from fedsim.sweep.search_texts import values_of

FEW = 4  # different values that a table lists one by one


def run_draws(
    config: str,
    wanted: Draws,
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
    if select not in (DEFAULT_RULE, "oracle"):
        raise UserError(f"--select {select}: draws are chosen by {DEFAULT_RULE}, or beside it by oracle")
    check_sampler(wanted.sampler, wanted.pruner)
    plans = plan_draws(config, wanted, overrides, preset)
    rule = rule_title(DEFAULT_RULE, plans[0].runs)
    say(f"{wanted.draws} draws of {', '.join(wanted.methods)} for {len(plans)} choices by {rule}")
    failed = run_plans(plans, budget, dry_run)
    if not dry_run:
        rows = [tuned_row(plan) for plan in plans]
        file = write_tuned(plans, rows)
        console.print(tuned_table(rows, rule), values_table(plans, rows))
        say(f"±: sample deviation over trials. near: draws at most {100 * NEAR:g} point of validation below the best; "
            "spread: points from the median draw to the best. Both say how flat the choice was.")  # fmt: skip
        say(f"all choices: {file}; all draws: {file.with_name('search.csv')}")
        if select != DEFAULT_RULE:
            console.print(tuned_table([tuned_row(plan, select) for plan in plans], RULE_TITLES[select]))
            say("ORACLE: draw and round were chosen on the unseen domain's labels. An upper bound, not a result.")
    return failed


def tuned_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Methods and unseen domains: mean and deviation over trials of the chosen draws, and what the choice cost."""
    (metric,) = (name for name in rows[0] if name.startswith("target_"))
    frame = pd.DataFrame(rows).rename(columns={"method": "label"})
    targets = list(dict.fromkeys(frame["target"]))
    table = Table("method", *map(escape, targets), AVERAGE, "untuned", "near", "spread", "steps", title=title)
    for label in dict.fromkeys(frame["label"]):
        own = frame[frame["label"] == label]
        grid = grid_of(frame.assign(accuracy=frame[metric].astype(float)), label).reindex(columns=targets)
        plain = grid_of(frame.assign(accuracy=frame[f"untuned_{metric}"].astype(float)), label)
        cells = [*(_mean(grid[target]) for target in targets), _mean(per_seed_average(grid, targets))]
        cells += [_mean(per_seed_average(plain, targets)), *_flatness(own), _price(own)]
        table.add_row(escape(label), *cells)
    return table


def _mean(values: pd.Series) -> str:
    found = mean_and_std(values)
    return percent(found["mean"]) + ("" if math.isnan(found["std"]) else f" ± {percent(found['std'])}")


def _flatness(own: pd.DataFrame) -> tuple[str, str]:
    """`6.5 of 20`, and the distance from the median draw's validation to that of the best, in points."""
    scored = own.dropna(subset=["score"])
    if scored.empty:
        return MISSING, MISSING
    spread = 100 * (scored["score"] - scored["median_score"]).astype(float).mean()
    return f"{scored['near'].astype(float).mean():.1f} of {scored['scored'].mean():g}", f"{spread:.1f}"


def _price(own: pd.DataFrame) -> str:
    """All steps of all draws, and how many times those of the untuned runs they are."""
    steps, plain = own["steps"].sum(), own["untuned_steps"].dropna().astype(float).sum()
    return f"{steps:,.0f}" + (f" ({steps / plain:.1f} x)" if plain else "")


def values_table(plans: Sequence[PlannedSearch], rows: Sequence[dict[str, Any]]) -> Table:
    """The chosen values of every drawn setting of a method, over its unseen domains and trials."""
    table = Table("method", "setting", "untuned", "chosen", title="chosen values")
    found: dict[tuple[str, str], tuple[str, list[str]]] = {}
    for plan, row in zip(plans, rows):
        if row["draw"] is not None:
            before, after = values_of(plan, plan.trials[0]), values_of(plan, plan.trials[row["draw"]])
            for key, value in after.items():
                found.setdefault((plan.search.method, key), (before[key], []))[1].append(value)
    for (method, key), (untuned, values) in found.items():
        table.add_row(escape(method), escape(key), escape(untuned), escape(_listed(values)))
    return table


def _listed(values: Sequence[str]) -> str:
    """`0.1 (4), 0.01 (2)`, or the least, the median and the greatest of many different numbers."""
    counts = Counter(values).most_common()
    if len(counts) <= FEW:
        return ", ".join(f"{value} ({count})" for value, count in counts)
    numbers = pd.Series(list(map(float, values)))
    return f"{numbers.min():.4g} to {numbers.max():.4g}, median {numbers.median():.4g}"
