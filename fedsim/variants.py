"""What a run's recipe changes in its row, as readable words, which are always in its folder's name and in its label."""

import dataclasses
import hashlib
import re
from typing import Any

from fedsim.assembly import assemble
from fedsim.errors import UserError
from fedsim.experiment import Experiment
from fedsim.part import Part, part_name
from fedsim.part_settings import make, parts_in, validated
from fedsim.recipe import LIST_SLOTS, SLOTS, Recipe, parts_of
from fedsim.registry import shipped_parts

LONGEST = 120  # characters: a folder's name holds 255 bytes, and the method's name and run.label stand beside it


def method_label(experiment: Experiment) -> str:
    """`fedprox@proximal.mu=0.01`: the method, and what the recipe changes in its row; UserError as for a recipe.

    The values of `[parts]` belong to the experiment and are not a change. Neither is a setting that repeats the row's
    own value, so that equal recipes have equal labels, whatever settings they came from.
    """
    return "@".join(filter(None, (experiment.method_name, variant_words(experiment))))


def same_method(a: Experiment, b: Experiment) -> bool:
    """Whether two experiments of one data set ask for the same recipe, perhaps in different words."""
    if a.method == b.method:
        return True
    try:
        return method_label(a) == method_label(b)
    except UserError:  # a record of a method or part that is no longer there
        return False


def variant_words(experiment: Experiment) -> str:
    """`add=guiding_head,guiding_head.weight=0.25`, the words in the order of the slots; empty for the row itself."""
    recipe = assemble(experiment.method, experiment.parts)
    row = assemble({"name": experiment.method_name}, experiment.parts)
    added, words = [], []
    for slot in SLOTS:
        before, after = ([_full_name(part) for part in parts_in(half, slot)] for half in (row, recipe))
        if slot in LIST_SLOTS and after[: len(before)] == before:
            added += [name for name in after[len(before) :] if name not in [*added, *_required(recipe, slot)]]
        elif before != after:
            words.append(f"{slot}={'+'.join(after) or 'none'}")
    if added:
        words.append(f"add={'+'.join(added)}")
    for part in dict.fromkeys(part for _, part in parts_of(recipe)):
        words += _field_words(part, _reference(part, row, experiment))
    return _short(",".join(words))


def _required(recipe: Recipe, slot: str) -> list[str]:
    """The names of parts that another part adds."""
    return [part.requires[slot] for _, part in parts_of(recipe) if slot in part.requires]


def _full_name(part: Part) -> str:
    """The settings name; of a part from outside the module and class, because a shipped part may have its name."""
    kind = type(part)
    return part_name(part) if kind in shipped_parts() else f"{kind.__module__}.{kind.__name__}"


def _reference(part: Part, row: Recipe, experiment: Experiment) -> Part:
    """The row's part of that kind; a new one with the experiment's own values where the row has none."""
    own = [present for _, present in parts_of(row) if type(present) is type(part)]
    name = part_name(part)
    return own[0] if own else validated(make(type(part)), experiment.parts.get(name, {}), f"parts.{name}")


def _field_words(part: Part, reference: Part) -> list[str]:
    """`name.field=value` of every field in which two parts of a kind differ."""
    names = [field.name for field in dataclasses.fields(part)]
    changed = [name for name in names if getattr(part, name) != getattr(reference, name)]
    return [f"{part_name(part)}.{name}={_text(getattr(part, name))}" for name in changed]


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "+".join(_text(each) for each in value) or "none"
    return (
        str(value).lower() if isinstance(value, bool) else f"{value:.12g}" if isinstance(value, float) else str(value)
    )


def _short(words: str) -> str:
    """The words as a part of a folder's name; what does not go into one is replaced, and a hash tells it apart."""
    plain = re.sub(r"[^\w.,=+-]+", "_", words)[:LONGEST]
    return plain if plain == words else f"{plain}~{hashlib.sha256(words.encode()).hexdigest()[:8]}"
