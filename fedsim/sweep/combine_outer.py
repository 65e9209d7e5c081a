"""The outer run of a combination search: the base, the winner and its parts on the unseen domain, at the same cost."""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedsim.common.console import say
from fedsim.common.errors import UserError
from fedsim.methods.listing import step_costs
from fedsim.methods.recipe import slots_of
from fedsim.methods.registry import find_row
from fedsim.methods.table import METHODS
from fedsim.run.plan import resolve, results_folder
from fedsim.settings.experiment import parse_override, read_experiment
from fedsim.sweep.axes import Axes, sweep_command
from fedsim.sweep.combine import Option, words_of
from fedsim.sweep.combine_plan import PlannedCombination
from fedsim.sweep.estimate import STEP_SLOTS, planned_steps
from fedsim.sweep.plan import Cell, plan_cells


@dataclass(frozen=True)
class Arm:
    """One row of the outer run. steps: those of a whole run over all clients, or None where they are not known before;
    cost: of a step, as a multiple of FedAvg's, or None where it was not measured."""

    what: str
    words: tuple[str, ...]
    rounds: int
    steps: float | None
    cost: float | None


def option_cost(option: Option, costs: Mapping[str, float]) -> float | None:
    """The cost of a local step with the option, from the cheapest measured row that has all its parts; FedAvg's is 1.

    A part of the server costs no step. None where no such row was measured.
    """
    kinds: set[type] = {type(part) for part in option.parts}
    if not any(slot in STEP_SLOTS for kind in kinds for slot in slots_of(kind)):
        return 1.0
    rows = [row for row in METHODS if kinds <= {type(part) for _, part in find_row(row).pairs}]
    known = [costs[row] for row in rows if row in costs]
    return max(1.0, min(known)) if known else None


def step_cost(method: str, options: Sequence[Option], costs: Mapping[str, float]) -> float | None:
    """The cost of a step of a method with some options: what each adds to FedAvg's is summed, and an update, which
    takes the whole gradient again, multiplies the sum. None where one of them was not measured."""
    own = {option: option_cost(option, costs) for option in options}
    known = [costs.get(method), *own.values()]
    if None in known:
        return None
    added = sum(cost - 1 for option, cost in own.items() if option.slot != "update" and cost)
    return (costs[method] + added) * math.prod(cost for option, cost in own.items() if option.slot == "update" and cost)


def arms(plan: PlannedCombination, target: str, winner: Sequence[Option], single: Sequence[Option] = ()) -> list[Arm]:
    """The base, the winner, the winner without each of its parts, each part alone, and the search's best single part.

    The winner has the experiment's rounds. Every other arm has the rounds that cost as much: the steps of all its
    clients, times the cost of a step. A step whose cost is not known counts like FedAvg's, and where steps are not
    known before the run, all arms count as if they took equally many.
    """
    named = {(): "base", tuple(winner): "winner"}
    if len(winner) > 1:
        for option in winner:
            rest = tuple(other for other in winner if other != option)
            named.setdefault(rest, f"{rest[0].text} alone" if len(rest) == 1 else f"without {option.text}")
        for option in winner:
            named.setdefault((option,), f"{option.text} alone")
    if single:
        named.setdefault(tuple(single), f"{single[0].text}: the best single part")
    made = {}
    for options, what in named.items():
        try:
            made[options] = _work(plan, target, options)
        except UserError as error:
            say(f"{what}: not part of the outer run, because it is refused: {error}")
    known = all(work for _, work in made.values())
    works = {options: work if work and known else (0.0, 1.0) for options, (_, work) in made.items()}
    costs = {options: step_cost(plan.search.method, options, step_costs()[0]) for options in made}
    before, each = works[tuple(winner)]
    whole = (before + plan.base.train.rounds * each) * (costs[tuple(winner)] or 1.0)
    found = []
    for options, (before, each) in works.items():
        cost = costs[options]
        rounds = max(1, round((whole / (cost or 1.0) - before) / each))
        steps = before + rounds * each if known else None
        found.append(Arm(named[options], tuple(made[options][0]), rounds, steps, cost))
    return found


def _work(
    plan: PlannedCombination, target: str, options: Sequence[Option]
) -> tuple[list[str], tuple[float, float] | None]:
    """(the overrides, their `planned_steps`)."""
    words = words_of(options, plan.base)
    start = [*plan.overrides, f"method.name={plan.search.method}", f"run.target={json.dumps(target)}"]
    return words, planned_steps(resolve(read_experiment(plan.config, [*start, *words], plan.preset)))


def sweep_of(plan: PlannedCombination, target: str, arm: Arm, seeds: Sequence[int]) -> tuple[Axes, list[str]]:
    """The axes and the overrides of an arm; where its rounds are not the experiment's, they are in its label."""
    scaled = arm.rounds != plan.base.train.rounds
    kept = [word for word in plan.overrides if not scaled or parse_override(word)[0] != "train.rounds"]
    axes = Axes([plan.search.method], [target], seeds, [f"train.rounds={arm.rounds}"] if scaled else [])
    return axes, [*kept, *arm.words]


def plan_arm(plan: PlannedCombination, target: str, arm: Arm, seeds: Sequence[int]) -> list[Cell]:
    """The cells of an arm."""
    return plan_cells(plan.config, *sweep_of(plan, target, arm, seeds), plan.preset)


def command(plan: PlannedCombination, target: str, arm: Arm, seeds: Sequence[int]) -> str:
    """The same cells as a command."""
    return sweep_command(plan.config, *sweep_of(plan, target, arm, seeds), plan.preset)


def compare_options(plan: PlannedCombination, found: Sequence[Arm]) -> tuple[str, list[str]]:
    """(the row of the base, the settings that tell the rows apart) in the comparison of the outer run."""
    label = "@".join(filter(None, (plan.search.method, plan.candidates[0].label)))
    same = len({arm.rounds for arm in found}) == 1
    return (label, []) if same else (f"{label} (rounds={found[0].rounds})", ["train.rounds"])


def compare_command(plan: PlannedCombination, target: str, found: Sequence[Arm], seeds: Sequence[int]) -> str:
    """The comparison of the outer run as a command."""
    baseline, by = compare_options(plan, found)
    words = ["fedsim", "compare", str(results_folder(plan.base)), "--targets", target]
    words += ["--seeds", ",".join(map(str, seeds)), "--baseline", baseline]
    return shlex.join([*words, *(part for key in by for part in ("--by", key))])


def fresh_seeds(plan: PlannedCombination, count: int) -> list[int]:
    """Seeds that the search has not used."""
    last = max(plan.search.seeds)
    return list(range(last + 1, last + 1 + count))
