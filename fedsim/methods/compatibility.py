"""Refuses recipes whose parts do not fit together, and says why: mostly by the facts that parts declare.

The vocabulary of facts is `fedsim.parts.facts`. Which part belongs to which record follows from the records' names. A
part has a `refuses` of its own only where a number or a setting decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from fedsim.common.errors import UserError
from fedsim.methods.recipe import LIST_SLOTS, Recipe
from fedsim.parts.facts import Fact, Facts
from fedsim.parts.part import Part, part_name
from strategies.bank import RESERVED_RECORDS, Bank


@dataclass(frozen=True)
class Pooling(Part):
    """Stands for what is true where one client holds the data of all (`Recipe.pooled`)."""

    breaks = (Fact.SEVERAL_CLIENTS,)


@dataclass(frozen=True)
class Tensors(Part):
    """Stands for what is true where the examples are tensors and no images (`Benchmark.images`)."""

    breaks = (Fact.IMAGES,)


def check_recipe(recipe: Recipe, name: str, images: bool = True) -> None:
    """Raise UserError, with the method's name, for a recipe whose parts do not fit together.

    images: whether the data set has images, and not tensors of another kind
    """
    extra = [*([Pooling()] if recipe.pooled else []), *([] if images else [Tensors()])]
    if reason := _twice(recipe) or _records(recipe) or _facts(recipe, extra) or _own(recipe) or _alone(recipe):
        raise UserError(f"{name}: {reason}")


def _own(recipe: Recipe) -> str:
    """What a part itself refuses."""
    return next(filter(None, (part.refuses(recipe) for _, part in recipe.pairs)), "")


def _facts(recipe: Recipe, extra: Sequence[Part]) -> str:
    """Why the facts of a recipe's parts contradict each other, or lack a part that provides them.

    extra: stands for what is true of the data
    """
    parts: list[Part] = [part for part in recipe.of(Part) if _acts(part)] + [*extra]
    for part, other in permutations(parts, 2):
        for fact in _assumed(part):
            if fact in (*other.breaks, *other.replaces):
                beside = f"which does not hold with {_named(other)}"
                return f"{_named(part)} assumes that {fact.sentence}, {beside}; {fact.advice}"
        for fact in part.replaces:
            if fact in other.replaces:
                return f"{_named(part)} and {_named(other)} cannot both change that {fact.sentence}; {fact.advice}"
    provided = {fact for part in parts for fact in part.provides}
    for part in parts:
        for fact in _assumed(part):
            if not fact.given and fact not in provided:
                return f"{_named(part)} assumes that {fact.sentence}, which does not hold here; {fact.advice}"
    return ""


def _named(part: Part) -> str:
    if isinstance(part, Pooling):
        return "all data pooled on one client"
    if isinstance(part, Tensors):
        return "these data (rows of a table, or other tensors)"
    return part_name(part)


def _acts(part: Part) -> bool:
    """Whether a part has an effect; a bank that is not shared has none."""
    return not isinstance(part, Bank) or part.shared


def _assumed(part: Part) -> Facts:
    """The facts that a part assumes."""
    facts = part.assumes
    facts += (Fact.WHOLE_MODEL,) if getattr(part, "whole", False) else ()
    return facts + ((Fact.SEVERAL_CLIENTS,) if getattr(part, "needs_clients", False) else ())


def _alone(recipe: Recipe) -> str:
    """Which part acts only with another one, exchanges a record or waits for a visit, and the other is not there."""
    for _, part in recipe.pairs:
        if part.belongs_to and part.belongs_to not in recipe.named:
            return f"{part_name(part)} acts only together with {part.belongs_to}; add that part, or leave this one out"
    banks = {bank.name: bank for bank in recipe.banks}
    senders = recipe.contributors()
    for name, bank in banks.items():
        if bank.contributed and bank.shared and name not in senders:
            return f"no part contributes to {part_name(bank)}; remove it from method.banks"
    for name, part in senders.items():
        if name not in banks:
            return f"{part_name(part)} needs the bank {name!r}; add it to method.banks"
        if not banks[name].shared:
            off = part_name(banks[name])
            return f"method.{off}.shared = false leaves {part_name(part)} without its bank; leave it out"
    if recipe.visits and recipe.unlabelled is None:
        return f"{part_name(recipe.visits[0])} needs a part in method.unlabelled that answers it"
    if recipe.unlabelled is not None and not recipe.visits:
        return f"{part_name(recipe.unlabelled)} is never visited; add a part to method.visits"
    return ""


def _twice(recipe: Recipe) -> str:
    """Which part, or which name of a part, is twice in a recipe."""
    named: dict[str, type] = {}
    for _, part in recipe.pairs:
        if named.setdefault(part_name(part), type(part)) is not type(part):
            return f"two different parts are called {part_name(part)}; rename the class of one"
    for slot in LIST_SLOTS:
        kinds = [type(part) for part in getattr(recipe, slot)]
        for kind in kinds:
            if kinds.count(kind) > 1:
                return f"{part_name(kind)} is twice in {slot}; once is enough"
    return ""


def _records(recipe: Recipe) -> str:
    """Which records of two parts have one name, because the later one would replace the earlier."""
    banks: dict[str, list[Bank]] = {}
    for part in recipe.banks:
        banks.setdefault(getattr(part, "name", ""), []).append(part)
    for bank, parts in banks.items():
        if not bank or bank in RESERVED_RECORDS:
            reason = f"has the name {bank!r}, which is another record's" if bank else "has no `name`"
            return f"the bank {part_name(parts[0])} {reason}; give it a name of its own"
        senders = [part for part in recipe.client_parts() if bank in part.contributes()]
        for what, those in (("are banks of", parts), ("contribute to", senders)):
            if len(those) > 1:
                both = " and ".join(part_name(part) for part in those)
                return f"{both} {what} one name, {bank!r}; rename the record of one, or use one of them"
    phases = [visit.phase for visit in recipe.visits]
    for visit in recipe.visits:
        if phases.count(visit.phase) > 1:
            return f"two visits are called {visit.phase!r}; rename the phase of one"
    return ""
