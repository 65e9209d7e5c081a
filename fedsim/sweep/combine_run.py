"""Runs a combination search, rung by rung, and on demand its outer run.

Which candidates a rung has is decided from the records on disk, so that the same command continues a search.
"""

from collections.abc import Sequence

from fedsim.common.console import say
from fedsim.results.plots import plot_search
from fedsim.sweep import carry_out
from fedsim.sweep.budget import Budget
from fedsim.sweep.combine_outer import Arm, fresh_seeds, plan_arm
from fedsim.sweep.combine_plan import Combination, PlannedCombination, plan_combinations
from fedsim.sweep.combine_texts import show_refused, show_winner, write_candidates
from fedsim.sweep.plan import Cell, look_for_data


def run_combinations(
    config: str,
    search: Combination,
    budget: Budget,
    *,
    overrides: Sequence[str] = (),
    preset: str = "",
    dry_run: bool = False,
    confirm: int = 0,
) -> tuple[list[Cell], PlannedCombination, dict[str, list[Arm]]]:
    """(the failed cells, the plan, {unseen domain: the arms of its outer run, where that has been run}).

    confirm: the number of fresh seeds of the outer run; 0: only its commands are shown
    """
    plan = plan_combinations(config, search, overrides, preset)
    show_refused(plan)
    folds = ", ".join(map(str, plan.rungs))
    domains = ", ".join(unseen.target for unseen in plan.unseen)
    say(f"{len(plan.candidates)} candidates on {plan.search.method} for {domains}; rungs with {folds} folds, and each "
        f"keeps the best third; at most {plan.most_runs} runs")  # fmt: skip
    failed: list[Cell] = []
    for rung in range(len(plan.rungs) + 1):
        cells = plan.cells(rung - 1) if rung else plan.base_cells()
        unfinished = any(cell.state == "waiting" for cell in cells)
        look_for_data(cells, budget, dry_run)
        say(
            f"rung {rung} of {len(plan.rungs)}"
            if rung
            else "the base on every fold, of which the rungs take the hardest first"
        )
        failed += [cell for cell in carry_out(cells, budget, dry_run) if cell not in failed]
        if dry_run and unfinished:
            say("What comes later follows from the records of these cells.")
            return failed, plan, {}
        plan.judge(rung - 1) if rung else plan.order_folds()
    found = {unseen.target: show_winner(plan, unseen, confirm) for unseen in plan.unseen}
    file = write_candidates(plan)
    say(f"all candidates: {file}; their figure: {plot_search(file.parent)[-1].with_suffix('.png')}")
    outer = {target: own for target, own in found.items() if own}
    if confirm and outer:
        seeds = fresh_seeds(plan, confirm)
        cells = [cell for target, own in outer.items() for arm in own for cell in plan_arm(plan, target, arm, seeds)]
        look_for_data(cells, budget, dry_run)
        failed += carry_out(cells, budget, dry_run)
    return failed, plan, outer if confirm and not dry_run else {}
