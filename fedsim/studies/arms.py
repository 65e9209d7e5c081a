"""The outer run of a combination search: the base, the winner and its parts on the unseen domain, at the same cost."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich.markup import escape
from rich.table import Table

from fedsim.common.console import say
from fedsim.common.errors import UserError
from fedsim.methods.listing import step_costs
from fedsim.methods.recipe import slots_of
from fedsim.methods.registry import find_row
from fedsim.methods.table import METHODS
from fedsim.runs.plan import resolve, results_folder
from fedsim.settings.experiment import parse_override
from fedsim.studies.axes import Axes, sweep_command
from fedsim.studies.candidates import Base, Option, Options, overrides_of
from fedsim.studies.estimate import STEP_SLOTS, planned_steps
from fedsim.studies.plan import Cell, plan_cells


@dataclass(frozen=True)
class Arm:
    """One row of the outer run.

    rounds: its rounds, with which it costs as much as the winner
    steps: those of a whole run over all clients, or None where they are not known before
    cost: of a step, as a multiple of FedAvg's, or None where it was not measured
    """

    title: str
    overrides: tuple[str, ...]
    rounds: int
    steps: float | None
    cost: float | None


@dataclass(frozen=True)
class Work:
    """The steps of a run over all clients: before the first round, and in each round."""

    before: float
    each_round: float


@dataclass(frozen=True)
class Draft:
    """An arm whose rounds are still open. cost: of a step, as in `Arm`."""

    title: str
    options: tuple[Option, ...]
    overrides: tuple[str, ...]
    work: Work | None
    cost: float | None

    def steps(self, rounds: int) -> float:
        """Return the steps of a run of so many rounds over all clients."""
        assert self.work is not None
        return self.work.before + rounds * self.work.each_round

    def rounds_for(self, price: float) -> int:
        """Return the rounds whose steps, times the cost of a step, are nearest to a price; at least one."""
        assert self.work is not None
        steps = price / (self.cost or 1.0) - self.work.before
        return max(1, round(steps / self.work.each_round))


def option_cost(option: Option, costs: Mapping[str, float]) -> float | None:
    """Return the cost of a local step with the option, from the cheapest measured row that has all its parts.

    FedAvg's step costs 1, and a part of the server costs no step. None where no such row was measured.
    """
    kinds: set[type] = {type(part) for part in option.parts}
    slots: set[str] = set()
    for kind in kinds:
        slots.update(slots_of(kind))
    if slots.isdisjoint(STEP_SLOTS):
        return 1.0
    measured = []
    for row in METHODS:
        recipe = find_row(row)
        in_row = {type(part) for _, part in recipe.pairs}
        if kinds <= in_row and row in costs:
            measured.append(costs[row])
    if not measured:
        return None
    return max(1.0, min(measured))


def step_cost(method: str, options: Options, costs: Mapping[str, float]) -> float | None:
    """Return the cost of a step of a method with some options; None where one of them was not measured.

    What each option adds to FedAvg's cost is summed. An update, which takes the whole gradient again, multiplies the
    sum.
    """
    if method not in costs:
        return None
    added, factor = 0.0, 1.0
    for option in options:
        cost = option_cost(option, costs)
        if cost is None:
            return None
        if option.slot == "update":
            factor *= cost
        else:
            added += cost - 1
    return (costs[method] + added) * factor


def arm_titles(winner: Options, single: Options = ()) -> dict[tuple[Option, ...], str]:
    """{options: title} of the outer run: the base, the winner, the winner without each of its parts, each part alone,
    and the best single part of the search; options that two titles have are there once."""
    titles: dict[tuple[Option, ...], str] = {(): "base", tuple(winner): "winner"}
    for option in winner:
        rest = tuple(other for other in winner if other != option)
        title = f"without {option.text}"
        if len(rest) == 1:
            title = f"{rest[0].text} alone"
        titles.setdefault(rest, title)
    for option in winner:
        titles.setdefault((option,), f"{option.text} alone")
    if single:
        titles.setdefault(tuple(single), f"{single[0].text}: the best single part")
    return titles


def plan_arms(
    base: Base,
    target: str,
    winner: Options,
    single: Options = (),
) -> list[Arm]:
    """Return the rows of the outer run on an unseen domain.

    The winner has the experiment's rounds. Every other arm has the rounds that cost as much: the steps of all its
    clients, times the cost of a step. A step whose cost is not known counts like FedAvg's, and where steps are not
    known before the run, all arms count as if they took equally many. An arm that is refused is named and left out.
    """
    drafts = []
    for options, title in arm_titles(winner, single).items():
        try:
            drafts.append(draft_arm(base, target, options, title))
        except UserError as error:
            say(f"{title}: not part of the outer run, because it is refused: {error}")
    are_counted = all(draft.work for draft in drafts)
    if not are_counted:
        drafts = [replace(draft, work=Work(0.0, 1.0)) for draft in drafts]
    of_winner = next(draft for draft in drafts if draft.options == tuple(winner))
    price = of_winner.steps(base.experiment.train.rounds) * (of_winner.cost or 1.0)
    arms = []
    for draft in drafts:
        rounds = draft.rounds_for(price)
        steps = draft.steps(rounds) if are_counted else None
        arms.append(Arm(draft.title, draft.overrides, rounds, steps, draft.cost))
    return arms


def draft_arm(
    base: Base,
    target: str,
    options: Options,
    title: str,
) -> "Draft":
    """Return an arm whose rounds are still open; UserError where the experiment refuses its options."""
    overrides = overrides_of(options, base.experiment)
    plan = resolve(base.read([f"run.target={json.dumps(target)}", *overrides]))
    steps = planned_steps(plan)
    work = Work(*steps) if steps else None
    cost = step_cost(base.method, options, step_costs()[0])
    return Draft(title, tuple(options), tuple(overrides), work, cost)


def grid_of_arm(
    base: Base,
    target: str,
    arm: Arm,
    seeds: Sequence[int],
) -> tuple[Axes, list[str]]:
    """(axes, overrides) of an arm's cells; where its rounds are not the experiment's, they are in its label."""
    overrides = list(base.overrides)
    grid = []
    if arm.rounds != base.experiment.train.rounds:
        overrides = [override for override in overrides if parse_override(override)[0] != "train.rounds"]
        grid = [f"train.rounds={arm.rounds}"]
    axes = Axes([base.method], [target], seeds, grid)
    return axes, [*overrides, *arm.overrides]


def plan_arm(
    base: Base,
    target: str,
    arm: Arm,
    seeds: Sequence[int],
) -> list[Cell]:
    """Return the cells of an arm."""
    return plan_cells(base.config, *grid_of_arm(base, target, arm, seeds), base.preset)


def command(
    base: Base,
    target: str,
    arm: Arm,
    seeds: Sequence[int],
) -> str:
    """Return the same cells as a command."""
    return sweep_command(base.config, *grid_of_arm(base, target, arm, seeds), base.preset)


def compare_options(base: Base, arms: Sequence[Arm]) -> tuple[str, list[str]]:
    """(the row of the base, the settings that tell the rows apart) in the comparison of the outer run."""
    label = f"{base.method}@{base.label}" if base.label else base.method
    if len({arm.rounds for arm in arms}) == 1:
        return label, []
    return f"{label} (rounds={arms[0].rounds})", ["train.rounds"]


def compare_command(
    base: Base,
    target: str,
    arms: Sequence[Arm],
    seeds: Sequence[int],
) -> str:
    """Return the comparison of the outer run as a command."""
    baseline, settings = compare_options(base, arms)
    folder = str(results_folder(base.experiment))
    parts = ["fedsim", "compare", folder]
    parts += ["--targets", target]
    parts += ["--seeds", ",".join(map(str, seeds))]
    parts += ["--baseline", baseline]
    for setting in settings:
        parts += ["--by", setting]
    return shlex.join(parts)


def arm_table(arms: Sequence[Arm]) -> Table:
    """Return the arms with their rounds, the steps over all clients, and the cost of a step (FedAvg's is 1)."""
    table = Table("outer run", "rounds", "steps", "cost of a step", "steps x cost")
    for arm in arms:
        cost = "1 (not measured)" if arm.cost is None else f"{arm.cost:.3f}"
        steps, price = "not known", ""
        if arm.steps is not None:
            steps = f"{arm.steps:,.0f}"
            price = f"{arm.steps * (arm.cost or 1):,.0f}"
        table.add_row(escape(arm.title), str(arm.rounds), steps, cost, price)
    return table
