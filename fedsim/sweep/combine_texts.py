"""What a combination search shows and writes: the table of its candidates, combinations.csv, the winner's settings."""

from pathlib import Path
from typing import Any

import tomli_w
from rich.markup import escape
from rich.table import Column, Table

from fedsim.common.console import console, say
from fedsim.common.files import atomic_write
from fedsim.methods.listing import step_costs
from fedsim.methods.part_settings import typed
from fedsim.results.recorder import csv_text
from fedsim.run.plan import results_folder
from fedsim.settings.experiment import parse_override
from fedsim.sweep.combine_outer import Arm, arms, command, compare_command, fresh_seeds
from fedsim.sweep.combine_plan import Candidate, Outcome, PlannedCombination, Unseen
from fedsim.sweep.reports import given_settings, nested, percent, rows_of_others

NAMES = ("method", "search", "target")
COLUMNS = (*NAMES, "rung", "candidate", "changes", "slots", "folds", "score", "outcome")
CONFIRMED = 5  # fresh seeds in the commands of the outer run


def title(candidate: Candidate) -> str:
    """What a candidate changes in the base."""
    return candidate.label or "none: the base"


def outcome_words(one: Outcome, last: int) -> str:
    """`kept: rank 3 of 60`, `dropped: diverged`, `winner: rank 1 of 7`."""
    return f"{'winner' if one.kept and one.rung == last else 'kept' if one.kept else 'dropped'}: {one.text}"


def candidate_table(plan: PlannedCombination, unseen: Unseen) -> Table:
    """All candidates of one unseen domain, the winner first, each with the last rung that it reached."""
    last, heading = len(plan.rungs), f"candidates without {unseen.target}"
    table = Table("no.", Column("changes", overflow="fold"), "rung", "folds", "score", "outcome", title=heading)
    for number, one in unseen.last.items():
        score = "" if one.score is None else percent(one.score)
        words = (title(one.candidate), f"{one.rung}/{last}", str(len(one.folds)), score, outcome_words(one, last))
        table.add_row(str(number), *map(escape, words))
    return table


def show_refused(plan: PlannedCombination) -> None:
    """Print the parts that are left out and the draws that were refused, with the reasons."""
    if plan.refused:
        say(f"left out, or drawn again: {len(plan.refused)}")
    for words, why in plan.refused:
        say(f"  {words}: {why}")


def show_winner(plan: PlannedCombination, unseen: Unseen, confirm: int) -> list[Arm]:
    """Print the table, the winner in three forms, and the outer run; returns the arms of that run."""
    console.print(candidate_table(plan, unseen))
    best = next(iter(unseen.last.values()), None)
    if best is None or not best.kept:
        say(f"{unseen.target}: no candidate has a score.")
        return []
    base = unseen.last[0]
    against = "" if base.score is None else f"; the base: {percent(base.score)} on {len(base.folds)} folds"
    say(f"best without {unseen.target}: {best.candidate.number} ({title(best.candidate)}), "
        f"{percent(best.score or 0)} on {len(best.folds)} folds{against}")  # fmt: skip
    if best.candidate.number == 0:
        say("No candidate is better than the base: nothing is to be changed.")
        return []
    values = dict(map(parse_override, best.candidate.words))
    say("\n" + tomli_w.dumps(nested(values)))
    say(" ".join(f"--set {typed(key, value)}" for key, value in values.items()))
    say("The score chose the winner, so that it is too favourable. The outer run, on fresh seeds and at the same cost:")
    singles = (one.candidate.options for one in unseen.last.values() if len(one.candidate.options) == 1)
    found = arms(plan, unseen.target, best.candidate.options, next(singles, ()))
    console.print(arm_table(found))
    say(f"cost of a step: {step_costs()[1]}; the costs of the parts are added, and an update multiplies them")
    seeds = fresh_seeds(plan, confirm or CONFIRMED)
    for arm in found:
        say(command(plan, unseen.target, arm, seeds))
    say(compare_command(plan, unseen.target, found, seeds))
    return found


def arm_table(found: list[Arm]) -> Table:
    """The arms with their rounds, the steps of a run over all clients, and the cost of a step beside FedAvg's."""
    table = Table("outer run", "rounds", "steps", "cost of a step", "steps x cost")
    for arm in found:
        steps = "not known" if arm.steps is None else f"{arm.steps:,.0f}"
        cost = "1 (not measured)" if arm.cost is None else f"{arm.cost:.3f}"
        whole = "" if arm.steps is None else f"{arm.steps * (arm.cost or 1):,.0f}"
        table.add_row(escape(arm.what), str(arm.rounds), steps, cost, whole)
    return table


def search_words(plan: PlannedCombination) -> str:
    """The settings on which a search depends, by which its rows are told from those of another one."""
    own = plan.search
    seeds = ",".join(map(str, dict.fromkeys(own.seeds)))
    words = [f"slots {','.join(own.slots)}", f"budget {own.budget}", f"seeds {seeds}", f"search seed {own.seed}"]
    return "; ".join([*words, *given_settings(plan.overrides, plan.preset)])


def rows_of(plan: PlannedCombination, unseen: Unseen) -> list[dict[str, Any]]:
    """The rows of one unseen domain: each candidate in each rung, and in rung 0 what was left out and why."""
    common: dict[str, Any] = {"method": plan.search.method, "search": search_words(plan), "target": unseen.target}
    refused = [common | {"rung": 0, "changes": words, "outcome": why} for words, why in plan.refused]
    return [
        *(
            common
            | {
                "rung": one.rung,
                "candidate": one.candidate.number,
                "changes": title(one.candidate),
                "slots": "+".join(option.slot for option in one.candidate.options),
                "folds": ",".join(one.folds),
                "score": one.score,
                "outcome": outcome_words(one, len(plan.rungs)),
            }
            for one in unseen.outcomes
        ),
        *refused,
    ]


def write_candidates(plan: PlannedCombination) -> Path:
    """Write combinations.csv into the experiment's folder; the rows of other searches are kept."""
    file = results_folder(plan.base) / "combinations.csv"
    rows = [row for unseen in plan.unseen for row in rows_of(plan, unseen)]
    atomic_write(file, csv_text(COLUMNS, [*rows_of_others(file, NAMES, rows), *rows]))
    return file
