"""The list of methods for a reader: what each row changes, what a local step costs, and what leaves the clients."""

import csv
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedsim.common.errors import UserError, nearest
from fedsim.common.lists import names_of
from fedsim.methods.recipe import SLOTS, Recipe
from fedsim.methods.registry import find_row
from fedsim.methods.table import METHODS
from fedsim.parts.facts import Fact
from fedsim.parts.part import part_name
from fedsim.settings.plugins import entry_points, origin

GROUPS = Path(__file__).with_name("groups.csv")
COSTS = Path(__file__).with_name("step_costs.csv")  # written by benchmarks/steps.py --write

# Without banks and reports: parts in these slots send what a part of another slot needs.
SIDES = {
    "server": ("share", "compress", "weights", "fuse", "refine", "visits"),
    "clients": ("objective", "update", "companions", "step", "terms", "batches", "augment", "unlabelled"),
    "model": ("norm", "inserts", "infer"),
}


@dataclass(frozen=True)
class MethodRow:
    """One method in the list. cost: the time of a local step divided by FedAvg's; None when it was not measured.

    problem: the reason why a row of an installed package cannot be used; its recipe is then FedAvg's
    """

    name: str
    recipe: Recipe
    origin: str
    cost: float | None
    problem: str = ""

    @cached_property
    def parts(self) -> dict[str, list[str]]:
        """Names of the parts in which the row differs from FedAvg's, by slot."""
        standard = {repr(part) for _, part in Recipe().pairs}
        groups: dict[str, list[str]] = {}
        for slot, part in self.recipe.pairs:
            if repr(part) not in standard:
                groups.setdefault(slot, []).append(part_name(part))
        return groups

    @property
    def group(self) -> str:
        """The sides that the row changes, for example "clients and server"."""
        if self.problem:
            return "cannot be used"
        if self.recipe.pooled:
            return "nothing is federated"
        sides = [side for side, slots in SIDES.items() if set(slots) & self.parts.keys()]
        return " and ".join(sides) or ("what is collected" if self.parts else "nothing: the reference")

    @property
    def changes(self) -> str:
        """The changed slots with their parts, in one line; the problem where there is one."""
        if self.problem:
            return self.problem
        pooled = ["pools the data of all clients"] if self.recipe.pooled else []
        return ", ".join([f"{slot}: {' + '.join(names)}" for slot, names in self.parts.items()] + pooled) or "-"


def in_words(recipe: Recipe) -> str:
    """What a recipe does, in one sentence: its local step, and then the slots that differ from FedAvg's."""
    parts = MethodRow("", recipe, "", None).parts

    def named(slot: str, words: str = "", otherwise: str = "") -> list[str]:
        names = parts.pop(slot, [])
        return [words + " and ".join(names)] if names else [otherwise] if otherwise else []

    sentences = named("step", "The local step is ")
    loss, move = (fact not in recipe.step.breaks for fact in (Fact.OBJECTIVE, Fact.UPDATE))
    step = named("objective", "takes the loss of ", "takes the task's loss" if loss else "")
    step += named("terms", "adds ") + named(
        "update", "moves the weights by ", "moves the weights by one gradient" if move else ""
    )
    step += named("companions", "is followed by a step of ")
    begin = f"{sentences[0]}, which" if sentences else "A local step"
    sentence = f"{begin} {', '.join(step[:-1])}{' and ' if step[1:] else ''}{step[-1]}" if step else sentences[0]
    rest = ", ".join(f"{' and '.join(names)} ({slot})" for slot, names in parts.items())
    pooled = ["one client holds all data"] if recipe.pooled else []
    return "; ".join([sentence, *([f"it also has {rest}"] if rest else []), *pooled])


def step_costs() -> tuple[dict[str, float], str]:
    """({method: cost of a local step divided by FedAvg's}, how it was measured)."""
    rows = list(csv.DictReader(COSTS.read_text().splitlines()))
    return {row["method"]: float(row["ratio"]) for row in rows}, rows[0]["measured"]


def listed(changes: str = "") -> dict[str, list[MethodRow]]:
    """All methods by group, in the order of METHODS; with `changes` only those that change one of these slots or sides.

    Raises UserError for a word that names neither a slot nor a side.
    """
    slots = {slot for word in names_of("--changes", changes) for slot in _slots(word)}
    costs, _ = step_costs()
    groups: dict[str, list[MethodRow]] = {}
    outside = [key for key, offered in entry_points("methods").items() if len(offered) == 1 and key not in METHODS]
    for name in [*METHODS, *outside]:
        row = _row(name, costs.get(name))
        if not changes or slots & row.parts.keys():
            groups.setdefault(row.group, []).append(row)
    return dict(sorted(groups.items(), key=lambda item: _place(item[0])))


def _row(name: str, cost: float | None) -> MethodRow:
    """The row of that name. One of a package that does not work is listed with the reason, and hides no other."""
    try:
        return MethodRow(name, METHODS.get(name) or find_row(name), origin("methods", name), cost)
    except UserError as error:
        return MethodRow(name, Recipe(), origin("methods", name), cost, str(error))


def _place(group: str) -> tuple[int, list[int]]:
    """A key that sorts the groups: the reference, one side, several sides, and last what is not federated."""
    sides = [list(SIDES).index(side) for side in group.split(" and ") if side in SIDES]
    return len(sides) if sides or "reference" in group else len(SIDES) + 1, sides


def _slots(word: str) -> tuple[str, ...]:
    slots = {slot: (slot,) for slot in SLOTS} | SIDES
    if word not in slots:
        raise UserError(f"--changes: no slot is called {word!r}; {nearest(word, slots)}known: {', '.join(slots)}")
    return slots[word]


def groups_text() -> str:
    """The text of `groups.csv` as it follows from METHODS, without the methods of installed packages."""
    rows = [f"{group},{row.name}" for group, members in listed().items() for row in members if row.name in METHODS]
    return "\n".join(["group,method", *rows, ""])


if __name__ == "__main__":
    GROUPS.write_text(groups_text())
