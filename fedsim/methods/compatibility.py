"""Derives from the facts that parts declare (`fedsim.parts.facts`) which parts do not fit together, and says why."""

from itertools import permutations

from fedsim.methods.recipe import Recipe, parts_of
from fedsim.parts.part import part_name


def misfit(recipe: Recipe) -> str:
    """Why the facts of a recipe's parts contradict each other, in one sentence; empty: they do not."""
    parts = list(dict.fromkeys(part for _, part in parts_of(recipe)))
    for part, other in permutations(parts, 2):
        names = part_name(part), part_name(other)
        for fact in part.assumes:
            if fact in (*other.breaks, *other.replaces):
                return f"{names[0]} assumes that {fact.sentence}, and {names[1]} changes that; {fact.advice}"
        for fact in part.replaces:
            if fact in other.replaces:
                both = " and ".join(names)
                return f"{both} both change that {fact.sentence}, which one part alone may do; {fact.advice}"
    return ""
