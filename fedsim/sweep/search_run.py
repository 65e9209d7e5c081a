"""Runs a search over hyper-parameters, or (with --dry-run) shows its trials and the time that they take.

Nothing that was measured on the unseen domain is shown or written.
"""

from collections.abc import Sequence

from rich.table import Table

from fedsim.common.console import say
from fedsim.results.selection import DEFAULT_RULE, rule_title
from fedsim.sweep import carry_out
from fedsim.sweep.budget import Budget, Reservation
from fedsim.sweep.plan import Cell, dry_table, look_for_data
from fedsim.sweep.search_plan import PlannedSearch, Search, plan_search
from fedsim.sweep.search_texts import show_result, trial_table, write_trials


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
    plan = plan_search(config, search, overrides, preset)
    seeds = list(dict.fromkeys(search.seeds))
    words = f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"
    keys, rule = ", ".join(knob.key for knob in plan.knobs), rule_title(DEFAULT_RULE, plan.runs)
    what = f"{len(plan.trials)} trials of {plan.search.method} on {', '.join(plan.targets)} with {words}"
    say(f"search over {keys}: {what}, scored by {rule}")
    if not dry_run and not budget.ray:
        look_for_data(plan.cells)
    failed = carry_out(
        plan.cells, budget, dry_run, lambda reservations: dry_trials(plan, reservations, budget), blind=True
    )
    if not dry_run:
        plan.read()
        write_trials(plan)
        show_result(plan)
    return failed


def dry_trials(plan: PlannedSearch, reservations: Sequence[Reservation], budget: Budget) -> Table:
    """The table of the trials as far as they are finished, with an estimate of the time that the others take."""
    plan.read()
    table = trial_table(plan)
    table.caption = dry_table(plan.cells, len(reservations) or budget.jobs).caption
    return table
