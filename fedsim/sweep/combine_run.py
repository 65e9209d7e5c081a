"""Runs a combination search, rung by rung, and on demand its outer run.

Which candidates a rung has is decided from the records on disk, so that the same command continues a search.
"""

from collections.abc import Sequence

from fedsim.common.console import say
from fedsim.results.plots import plot_search
from fedsim.sweep.budget import Budget
from fedsim.sweep.combine_outer import Arm, fresh_seeds, plan_arm
from fedsim.sweep.combine_plan import Combination, PlannedCombination, plan_combinations
from fedsim.sweep.combine_texts import show_refused, show_winner, write_candidates
from fedsim.sweep.loop import carry_out
from fedsim.sweep.plan import Cell
from fedsim.sweep.study import Study


class Combinations(Study):
    """The base on every fold, then the rungs, and on demand the outer run.

    confirm: the number of fresh seeds of the outer run; 0: only its commands are shown
    """

    def __init__(self, plan: PlannedCombination, confirm: int) -> None:
        self.plan, self.confirm = plan, confirm
        self.outer: dict[str, list[Arm]] = {}  # {unseen domain: the arms of its outer run}
        self._step = -1  # 0: the base, then the rungs; the step after the last rung is the outer run

    def ask(self) -> list[Cell]:
        self._step += 1
        if self._step == 0:
            return self.plan.base_cells()
        if self._step <= len(self.plan.rungs):
            return self.plan.cells(self._step - 1)
        if self._step > len(self.plan.rungs) + 1 or not self.confirm:
            return []
        seeds = fresh_seeds(self.plan, self.confirm)
        cells = []
        for target, arms in self.outer.items():
            for arm in arms:
                cells += plan_arm(self.plan, target, arm, seeds)
        return cells

    def begin(self, dry_run: bool) -> None:
        if self._step == 0:
            say("the base on every fold, of which the rungs take the hardest first")
        elif self._step <= len(self.plan.rungs):
            say(f"rung {self._step} of {len(self.plan.rungs)}")

    def looks_beyond(self, cells: Sequence[Cell]) -> bool:
        if self._step <= len(self.plan.rungs) and any(cell.state == "waiting" for cell in cells):
            say("What comes later follows from the records of these cells.")
            return False
        return True

    def tell(self, cells: Sequence[Cell]) -> None:
        if self._step == 0:
            self.plan.order_folds()
        elif self._step <= len(self.plan.rungs):
            self.plan.judge(self._step - 1)
        if self._step == len(self.plan.rungs):
            self._show_winners()

    def _show_winners(self) -> None:
        for unseen in self.plan.unseen:
            if arms := show_winner(self.plan, unseen, self.confirm):
                self.outer[unseen.target] = arms
        file = write_candidates(self.plan)
        say(f"all candidates: {file}; their figure: {plot_search(file.parent)[-1].with_suffix('.png')}")


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
    study = Combinations(plan, confirm)
    failed = carry_out(study, budget, dry_run)
    return failed, plan, study.outer if confirm and not dry_run else {}
