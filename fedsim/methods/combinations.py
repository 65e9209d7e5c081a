"""Combines two rows into one recipe."""

import dataclasses

from fedsim.common.errors import UserError
from fedsim.methods.recipe import LIST_SLOTS, SLOTS, Filled, Recipe, changed_fields
from fedsim.parts.part import part_name

TEXTS = ("paper", "discloses")


def combine(a: tuple[str, Recipe], b: tuple[str, Recipe]) -> tuple[str, Recipe]:
    """(name, recipe) of both rows in one: lists are joined, and a part that differs from FedAvg's replaces FedAvg's.

    Raises UserError when both rows have a part of their own in one slot, and when a row adds nothing to the other.
    """
    name = f"{a[0]}+{b[0]}"
    parts: Filled = {slot: _joined(slot, a, b) for slot in SLOTS}
    texts: Filled = {text: _both(getattr(a[1], text), getattr(b[1], text)) for text in TEXTS}
    tried_with = tuple(dict.fromkeys((*a[1].tried_with, *b[1].tried_with)))
    both = Recipe(**parts, **texts, pooled=a[1].pooled or b[1].pooled, tried_with=tried_with)
    for (half, recipe), other in ((a, b[0]), (b, a[0])):
        if same_parts(both, recipe):
            raise UserError(f"{name}: {other} adds nothing to {half}; use {half} alone")
    return name, both


def _both(one: str, other: str) -> str:
    """Two texts joined in one line; an empty text is left out, and equal texts appear once."""
    return "; ".join(dict.fromkeys(text for text in (one, other) if text))


def _joined(slot: str, a: tuple[str, Recipe], b: tuple[str, Recipe]) -> object:
    """The parts of the combination in one slot."""
    first, second, standard = getattr(a[1], slot), getattr(b[1], slot), getattr(Recipe(), slot)
    if slot in LIST_SLOTS:
        rest = tuple(part for part in second if part not in first)
        clash = [(one, other) for one in first for other in rest if type(one) is type(other)]
        if not clash:
            return first + rest
        first, second = clash[0]
    elif first in (standard, second) or second == standard:
        return second if second != standard else first
    one, other = part_name(first), part_name(second)
    if type(first) is type(second):
        one, other = (
            f"{part_name(part)} with " + ", ".join(f"{field} = {value!r}" for field, value in fields.items())
            for part, fields in ((first, changed_fields(first, second)), (second, changed_fields(second, first)))
        )
    raise UserError(f"{a[0]} and {b[0]} cannot be combined: {slot} is {one} in one and {other} in the other")


def same_parts(a: Recipe, b: Recipe) -> bool:
    """Whether two recipes have the same parts; their texts may differ."""
    blank: Filled = {**dict.fromkeys(TEXTS, ""), "tried_with": ()}
    return dataclasses.replace(a, **blank) == dataclasses.replace(b, **blank)
