"""The candidates of a search over combinations: what each slot offers, and the seeded draw of a candidate.

Candidate 0 is the base method itself. The others change one to three of its slots. A draw depends only on the search's
seed and the number of the candidate, so that a greater budget changes none of the candidates that were there before.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fedsim.common.errors import UserError
from fedsim.common.seeding import numpy_rng
from fedsim.data import benchmark
from fedsim.methods.assembly import assemble
from fedsim.methods.part_settings import toml_value
from fedsim.methods.recipe import Recipe, changed_fields
from fedsim.methods.registry import find_row
from fedsim.methods.table import METHODS
from fedsim.methods.variants import variant_words
from fedsim.parts.part import Part, part_name
from fedsim.runs.plan import resolve
from fedsim.settings.effect import conditions
from fedsim.settings.experiment import Experiment, read_experiment
from fedsim.studies.plan import refusal_of

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
        names = map(part_name, self.parts)
        return f"{self.slot}={'+'.join(names)}"


Options = Sequence[Option]
Refusal = Callable[[Options], str]  # why the base method cannot have some options, or an empty text


@dataclass(frozen=True)
class Base:
    """The method whose slots are changed, and the experiment file, overrides and preset with which it was asked for."""

    config: str
    experiment: Experiment
    overrides: Sequence[str]
    preset: str

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.experiment.method_name

    @property
    def label(self) -> str:
        """What the overrides change in the method, as in the names of folders."""
        return variant_words(self.experiment)

    def read(self, settings: Sequence[str]) -> Experiment:
        """Return the experiment of the base with some more overrides."""
        return read_experiment(self.config, [*self.overrides, f"method.name={self.method}", *settings], self.preset)


@dataclass(frozen=True)
class Candidate:
    """Some options on the base method. label: what the overrides change, as in the names of folders."""

    number: int
    options: tuple[Option, ...]
    overrides: tuple[str, ...]
    label: str

    @property
    def title(self) -> str:
        """What the candidate changes in the base."""
        return self.label or "none: the base"


def overrides_of(options: Options, base: Experiment) -> list[str]:
    """Return the overrides that change the base: `method.add`, and the fields in which the parts are not as added.

    Raises UserError when two of the parts exclude each other.
    """
    parts = list(dict.fromkeys(part for option in options for part in option.parts))
    _refuse_other_fields(parts, options)
    present = {type(part) for _, part in assemble(base.method, base.parts).pairs}
    added = [part_name(part) for part in parts if type(part) not in present]
    names = base.method.get("add", [])
    if isinstance(names, str):
        names = [names]
    names = [*names, *added]
    as_added = assemble({**base.method, "add": names}, base.parts).named
    overrides = []
    if added:
        overrides.append(f"method.add={toml_value(names)}")
    for part in parts:
        name = part_name(part)
        for field, value in changed_fields(part, as_added[name]).items():
            overrides.append(f"method.{name}.{field}={toml_value(value)}")
    return overrides


def _refuse_other_fields(parts: Sequence[Part], options: Options) -> None:
    """UserError where two parts are of one kind and have other fields."""
    kinds = [type(part) for part in parts]
    for part in parts:
        if kinds.count(type(part)) > 1:
            texts = " and ".join(option.text for option in options)
            raise UserError(f"{part_name(part)} has other fields in {texts}")


def find_options(slots: Sequence[str], base: Experiment, refusal: Refusal) -> tuple[list[Option], dict[str, str]]:
    """(the options of all slots, {`slot=part` that is left out: why}), from the rows of METHODS.

    Rows that pool the data, or that train on unlabelled images of the unseen domain, offer nothing. A part that does
    nothing without data of its own is left out, and so is one that this experiment refuses even with its whole row.
    """
    present = {part for _, part in assemble(base.method, base.parts).pairs}
    offered: dict[tuple[str, Part], Option] = {}
    reasons: dict[tuple[str, Part], str] = {}
    for alone, recipe in _parts_of_rows(slots, base):
        place = (alone.slot, alone.parts[0])
        if alone.parts[0] in present or place in offered:
            continue
        others = _other_parts(recipe, {alone.parts[0], *present})
        option, reason = _least_option(alone, others, refusal)
        if option:
            offered[place] = option
        else:
            reasons[place] = reason
    left_out = {}
    for (slot, part), reason in reasons.items():
        if (slot, part) not in offered:
            left_out[f"{slot}={part_name(part)}"] = reason
    options = sorted(offered.values(), key=lambda option: slots.index(option.slot))
    return options, left_out


def _parts_of_rows(slots: Sequence[str], base: Experiment) -> Iterator[tuple[Option, Recipe]]:
    """(one part in one of the slots, the recipe of its row) of the rows that are federated and see no unseen image."""
    for row in METHODS:
        as_listed = find_row(row)
        if as_listed.pooled or as_listed.uses_target_unlabelled:
            continue
        recipe = assemble({"name": row}, base.parts)
        for slot in slots:
            for part in recipe.parts_in(slot):
                yield Option(slot, (part,), row), recipe


def _other_parts(recipe: Recipe, present: set[Part]) -> list[Part]:
    """The parts of a row that neither FedAvg nor the base has."""
    standard = {part for _, part in Recipe().pairs}
    return [part for part in recipe.of(Part) if part not in standard | present]


def _least_option(alone: Option, others: Sequence[Part], refusal: Refusal) -> tuple[Option | None, str]:
    """(the option with the fewest other parts of the row that is not refused, or why even the whole row is)."""
    if reason := _lacking_data(alone.parts[0]):
        return None, reason
    reason = ""
    for count in range(len(others) + 1):
        for chosen in itertools.combinations(others, count):
            option = dataclasses.replace(alone, parts=(*alone.parts, *chosen))
            reason = refusal([option])
            if not reason:
                return option, ""
    return None, reason


def _lacking_data(part: Part) -> str:
    """Why a part has no effect as it is: all its fields wait for data that it does not name; empty otherwise."""
    kind: type = type(part)
    waiting = []
    for name, needs in conditions(kind).items():
        if not any(need.holds(part, {}, (None,)) for need in needs):
            waiting.append(name)
    free = [field.name for field in dataclasses.fields(part) if field.name not in waiting]
    if waiting and all(getattr(part, name) == "" for name in free):
        return f"it does nothing without method.{part_name(part)}.{' and '.join(free)}"
    return ""


def draw(
    options: Options,
    seed: int,
    number: int,
    attempt: int = 0,
) -> tuple[Option, ...]:
    """Return the options of a candidate: one for an odd number, otherwise of two or three slots.

    The odd ones take the options one by one, in a seeded order, so that a single part can win. When none is left, they
    are drawn like the others. With one slot all candidates have one option; empty: none is left.
    """
    by_slot: dict[str, list[Option]] = {}
    for option in options:
        by_slot.setdefault(option.slot, []).append(option)
    has_one_slot = len(by_slot) <= 1
    place = number - 1 if has_one_slot else number // 2
    if place < len(options) and not attempt and (number % 2 or has_one_slot):
        order = numpy_rng(seed, "slots").permutation(len(options))
        return (options[int(order[place])],)
    if has_one_slot:
        return ()
    rng = numpy_rng(seed, "slots", number, attempt)
    changes = int(rng.integers(2, MOST_CHANGES + 1))
    count = min(changes, len(by_slot))
    chosen = []
    drawn = rng.permutation(len(by_slot))[:count]
    lists = list(by_slot.values())
    for slot in sorted(drawn):
        place = int(rng.integers(len(lists[slot])))
        chosen.append(lists[slot][place])
    return tuple(chosen)


def draw_all(
    options: Options,
    seed: int,
    budget: int,
    accept: Callable[[int, tuple[Option, ...]], A | None],
) -> Iterator[A]:
    """Yield what `accept` makes of each candidate from number 1 on. A draw for which it gives None is drawn again.

    It ends before the budget when TRIES draws in a row were not accepted, or were there before.
    """
    seen: set[tuple[Option, ...]] = {()}
    for number in range(1, budget):
        for attempt in range(TRIES):
            chosen = draw(options, seed, number, attempt)
            candidate = None if chosen in seen else accept(number, chosen)
            seen.add(chosen)
            if candidate is not None:
                yield candidate
                break
        else:
            return


def without(base: Experiment, target: str) -> list[str]:
    """Return the overrides that take a domain out of the data, and its runs into an experiment of their own."""
    rest = [domain for domain in benchmark(base.data).domains if domain != target]
    name = f"{base.name}-without-{target}".replace("/", "_").replace("\\", "_")
    return [f"data.domains={json.dumps(rest)}", f"name={json.dumps(name)}"]


class FirstFold:
    """The first fold of an unseen domain, on which candidates are checked: the experiment may refuse their parts."""

    def __init__(
        self,
        base: Base,
        unseen: str,
        fold: str,
    ) -> None:
        self.base = base
        self.refused: list[tuple[str, str]] = []  # (what was left out or drawn again, why)
        self._settings = [*without(base.experiment, unseen), f"run.target={json.dumps(fold)}"]
        self._labels = {base.label: 0}

    def draw(
        self,
        slots: Sequence[str],
        seed: int,
        budget: int,
    ) -> list[Candidate]:
        """Return the base and the other candidates; UserError where the base is refused, or no slot has an option."""
        self.resolved([])
        options, left_out = find_options(slots, self.base.experiment, self.refusal)
        if not options:
            raise UserError(f"--slots {','.join(slots)}: no row of METHODS has another part for them here")
        self.refused += left_out.items()
        return [Candidate(0, (), (), self.base.label), *draw_all(options, seed, budget, self.accept)]

    def resolved(self, overrides: Sequence[str]) -> Experiment:
        """Return the experiment of the fold with some overrides; UserError where it refuses the parts."""
        plan = resolve(self.base.read([*self._settings, *overrides]))
        plan.refuse_misfits()
        return plan.experiment

    def refusal(self, options: Options) -> str:
        """Return why the base cannot have the options; empty where it can."""
        return refusal_of(lambda: self.resolved(overrides_of(options, self.base.experiment)))

    def accept(self, number: int, options: tuple[Option, ...]) -> Candidate | None:
        """Return the candidate with these options; None where they are refused, or change what another one changes."""
        try:
            overrides = overrides_of(options, self.base.experiment)
            label = variant_words(self.resolved(overrides))
        except UserError as error:
            self.refused.append((", ".join(option.text for option in options), str(error)))
            return None
        if self._labels.setdefault(label, number) != number:
            return None
        return Candidate(number, options, tuple(overrides), label)
