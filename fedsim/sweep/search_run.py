"""Runs a search over hyper-parameters, or (with --dry-run) shows its trials and the time that they take.

Nothing that was measured on the unseen domain is shown or written.
"""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from fedsim.common.console import say
from fedsim.results.selection import DEFAULT_RULE, rule_title
from fedsim.sweep import search_plan
from fedsim.sweep.budget import Budget
from fedsim.sweep.estimate import cell_table
from fedsim.sweep.loop import carry_out
from fedsim.sweep.plan import Cell
from fedsim.sweep.sampler import RANDOM, check_sampler
from fedsim.sweep.search_plan import PlannedSearch, Search, plan_search
from fedsim.sweep.search_texts import show_result, trial_table, write_trials
from fedsim.sweep.study import Study


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


class Searches(Study):
    """Several searches that are run together: all trials that are known, and then those that follow from them."""

    is_blind = True

    def __init__(self, plans: Sequence[PlannedSearch]) -> None:
        self.plans = plans
        self._asked: set[Path] = set()

    def ask(self) -> list[Cell]:
        cells = [cell for plan in self.plans for cell in plan.cells if cell.folder not in self._asked]
        self._asked |= {cell.folder for cell in cells}
        return cells

    def tell(self, cells: Sequence[Cell]) -> None:
        for plan in self.plans:
            plan.read()

    def table(self, cells: Sequence[Cell], width: int) -> Table:
        """Return the trials as far as they are finished, with an estimate of the time that the others take.

        Of several searches it is a table of the cells.
        """
        table = cell_table([cell for plan in self.plans for cell in plan.cells], width)
        later = sum(plan.search.trials - len(plan.trials) for plan in self.plans)
        if later:
            table.caption = f"{table.caption}; {later} trials follow from the scores of these"
        if len(self.plans) > 1:
            return table
        self.plans[0].read()
        trials = trial_table(self.plans[0])
        trials.caption = table.caption
        return trials


def run_plans(plans: Sequence[PlannedSearch], budget: Budget, dry_run: bool) -> list[Cell]:
    """Run the cells of several searches together, and then the trials that follow from them, until there are no more.

    Returns the failed cells. Nothing of the unseen domain is shown.
    """
    search = plans[0].search
    if search.trials <= search_plan.STARTUP and (search.pruner or search.sampler != RANDOM):
        say(f"--sampler and --pruner have no effect on {search.trials} draws: the first {search_plan.STARTUP} are "
            "drawn at random and never pruned")  # fmt: skip
    return carry_out(Searches(plans), budget, dry_run)
