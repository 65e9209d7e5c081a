"""Runs a search over hyper-parameters, or (with --dry-run) shows its trials and the time that they take.

Nothing that was measured on the unseen domain is shown or written.
"""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from fedsim.common.console import say
from fedsim.results.selection import DEFAULT_RULE, rule_title
from fedsim.sweep import carry_out, search_plan
from fedsim.sweep.budget import Budget
from fedsim.sweep.plan import Cell, dry_table, look_for_data
from fedsim.sweep.sampler import RANDOM, check_sampler
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
    check_sampler(search.sampler, search.pruner)
    plan = plan_search(config, search, overrides, preset)
    seeds = list(dict.fromkeys(search.seeds))
    words = f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"
    keys, rule = ", ".join(knob.key for knob in plan.knobs), rule_title(DEFAULT_RULE, plan.runs)
    what = f"{search.trials} trials of {plan.search.method} on {', '.join(plan.targets)} with {words}"
    say(f"search over {keys}: {what}, scored by {rule}")
    failed = run_plans([plan], budget, dry_run)
    if not dry_run:
        write_trials(plan)
        show_result(plan)
    return failed


def run_plans(plans: Sequence[PlannedSearch], budget: Budget, dry_run: bool) -> list[Cell]:
    """Run the cells of several searches together, and then the trials that follow from them, until there are no more.

    Returns the failed cells. Nothing of the unseen domain is shown.
    """
    search = plans[0].search
    if search.trials <= search_plan.STARTUP and (search.pruner or search.sampler != RANDOM):
        say(f"--sampler and --pruner have no effect on {search.trials} draws: the first {search_plan.STARTUP} are "
            "drawn at random and never pruned")  # fmt: skip
    seen: dict[Path, Cell] = {}
    failed: list[Cell] = []
    while cells := [cell for plan in plans for cell in plan.cells if cell.folder not in seen]:
        seen |= {cell.folder: cell for cell in cells}
        look_for_data(cells, budget, dry_run)
        failed += carry_out(cells, budget, dry_run, lambda width: dry_trials(plans, width), True)
        if dry_run:
            return failed
        for plan in plans:
            plan.read()
    return failed


def dry_trials(plans: Sequence[PlannedSearch], width: int) -> Table:
    """The table of the trials as far as they are finished, with an estimate of the time that the others take.

    Of several searches it is a table of the cells.
    """
    cells = dry_table([cell for plan in plans for cell in plan.cells], width)
    later = sum(plan.search.trials - len(plan.trials) for plan in plans)
    cells.caption = f"{cells.caption}; {later} trials follow from the scores of these" if later else cells.caption
    if len(plans) > 1:
        return cells
    plans[0].read()
    table = trial_table(plans[0])
    table.caption = cells.caption
    return table
