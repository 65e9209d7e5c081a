"""Combinations of parts: what each slot offers, the seeded draw of a candidate, and successive halving over folds.

Candidate 0 is the base method itself. The others change one to three of its slots. A draw depends only on the search's
seed and the number of the candidate, so that a greater budget changes none of the candidates that were there before.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fedsim.common.errors import UserError
from fedsim.common.seeding import numpy_rng
from fedsim.methods.assembly import assemble
from fedsim.methods.part_settings import toml_value
from fedsim.methods.recipe import Recipe, changed_fields
from fedsim.methods.registry import find_row
from fedsim.methods.table import METHODS
from fedsim.parts.part import Part, part_name
from fedsim.settings.effect import conditions
from fedsim.settings.experiment import Experiment
from fedsim.sweep.scores import ranking

A = TypeVar("A")

MOST_CHANGES = 3  # slots of the base that a candidate changes
TRIES = 300  # draws for one candidate, after which the combinations count as used up


@dataclass(frozen=True)
class Option:
    """What may be put into a slot: the part that a row has there, and those of its other parts without which the part
    is refused."""

    slot: str
    parts: tuple[Part, ...]
    row: str

    @property
    def text(self) -> str:
        """`terms=drift_correction+control_variates`"""
        return f"{self.slot}={'+'.join(map(part_name, self.parts))}"


def words_of(options: Sequence[Option], base: Experiment) -> list[str]:
    """The overrides that change the base method: `method.add`, and the fields in which the parts are not as added.

    Raises UserError when two of the parts exclude each other.
    """
    parts = list(dict.fromkeys(part for option in options for part in option.parts))
    kinds = [type(part) for part in parts]
    if twice := next((part for part in parts if kinds.count(type(part)) > 1), None):
        raise UserError(f"{part_name(twice)} has other fields in {' and '.join(option.text for option in options)}")
    own = {type(part) for _, part in assemble(base.method, base.parts).pairs}
    given = base.method.get("add", [])
    added = [part_name(part) for part in parts if type(part) not in own]
    names = [*([given] if isinstance(given, str) else given), *added]
    made = assemble({**base.method, "add": names}, base.parts).named
    words = [f"method.add={toml_value(names)}"] if added else []
    for part in parts:
        name = part_name(part)
        changed = changed_fields(part, made[name])
        words += [f"method.{name}.{field}={toml_value(value)}" for field, value in changed.items()]
    return words


def options_in(
    slots: Sequence[str], base: Experiment, refusal: Callable[[Sequence[Option]], str]
) -> tuple[list[Option], dict[str, str]]:
    """(the options of all slots, {`slot=part` that is left out: why}), from the rows of METHODS.

    refusal: why the base method cannot have some options, or an empty text

    Rows that pool the data, or that train on unlabelled images of the unseen domain, offer nothing. A part that does
    nothing without data of its own is left out, and so is one that this experiment refuses even with its whole row.
    """
    own = {part for _, part in assemble(base.method, base.parts).pairs}
    found: dict[tuple[str, Part], Option] = {}
    refused: dict[tuple[str, Part], str] = {}
    for row in METHODS:
        recipe = find_row(row)
        if recipe.pooled or recipe.uses_target_unlabelled:
            continue
        recipe = assemble({"name": row}, base.parts)
        for slot in slots:
            for part in recipe.parts_in(slot):
                if part in own or (slot, part) in found:
                    continue
                option, why = _least(slot, part, row, recipe, own, refusal)
                if option:
                    found[slot, part] = option
                else:
                    refused[slot, part] = why
    left_out = {f"{slot}={part_name(part)}": why for (slot, part), why in refused.items() if (slot, part) not in found}
    ordered = sorted(found.values(), key=lambda option: slots.index(option.slot))
    return ordered, left_out


def _least(
    slot: str, part: Part, row: str, recipe: Recipe, own: set[Part], refusal: Callable[[Sequence[Option]], str]
) -> tuple[Option | None, str]:
    """(the option with the fewest other parts of the row that is not refused, or why even the whole row is)."""
    if why := _idle(part):
        return None, why
    standard = {other for _, other in Recipe().pairs} | own | {part}
    others = [other for other in recipe.of(Part) if other not in standard]
    for count in range(len(others) + 1):
        for chosen in itertools.combinations(others, count):
            option = Option(slot, (part, *chosen), row)
            if not (why := refusal([option])):
                return option, ""
    return None, why


def _idle(part: Part) -> str:
    """Why a part has no effect as it is: all its fields wait for data that it does not name; empty otherwise."""
    kind: type = type(part)
    needs = conditions(kind)
    waiting = [name for name, own in needs.items() if not any(one.holds(part, {}, (None,)) for one in own)]
    free = [field.name for field in dataclasses.fields(part) if field.name not in waiting]
    if waiting and all(getattr(part, name) == "" for name in free):
        return f"it does nothing without method.{part_name(part)}.{' and '.join(free)}"
    return ""


def draw(options: Sequence[Option], seed: int, number: int, attempt: int = 0) -> tuple[Option, ...]:
    """The options of a candidate: one for an odd number, otherwise of two or three slots.

    The odd ones take the options one by one, in a seeded order, so that a single part can win. When none is left, they
    are drawn like the others. With one slot all candidates have one option; empty: none is left.
    """
    by_slot: dict[str, list[Option]] = {}
    for option in options:
        by_slot.setdefault(option.slot, []).append(option)
    several = len(by_slot) > 1
    place = number // 2 if several else number - 1
    if place < len(options) and not attempt and (number % 2 or not several):
        return (options[int(numpy_rng(seed, "slots").permutation(len(options))[place])],)
    if not several:
        return ()
    rng = numpy_rng(seed, "slots", number, attempt)
    count = min(int(rng.integers(2, MOST_CHANGES + 1)), len(by_slot))
    slots = sorted(rng.permutation(len(by_slot))[:count])
    chosen = [list(by_slot.values())[slot] for slot in slots]
    return tuple(own[int(rng.integers(len(own)))] for own in chosen)


def draw_all(
    options: Sequence[Option], seed: int, budget: int, accept: Callable[[int, tuple[Option, ...]], A | None]
) -> Iterator[A]:
    """What `accept` makes of each candidate from number 1 on. A draw for which it gives None is drawn again.

    It ends before the budget when TRIES draws in a row were not accepted, or were there before.
    """
    seen: set[tuple[Option, ...]] = {()}
    for number in range(1, budget):
        for attempt in range(TRIES):
            chosen = draw(options, seed, number, attempt)
            made = None if chosen in seen else accept(number, chosen)
            seen.add(chosen)
            if made is not None:
                yield made
                break
        else:
            return


def stages(folds: int) -> list[int]:
    """The number of folds in each rung: one, half of them, all."""
    return sorted({1, math.ceil(folds / 2), folds})


def halve(scores: Mapping[int, float | None]) -> list[int]:
    """The candidates of the next rung: the best third of all but the base, and the base, with which they are compared.

    A candidate without a score is never kept.
    """
    ordered = list(ranking(scores))
    others = [number for number in ordered if number]
    kept = others[: math.ceil(len(scores.keys() - {0}) / 3)]
    return [number for number in ordered if number in kept or number == 0]
