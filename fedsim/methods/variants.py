"""A text with the changes of a run's recipe to its row; it is part of the name of the run's folder and of its label."""

import hashlib
import re

from fedsim.common.errors import UserError
from fedsim.common.values import JsonTable
from fedsim.methods.assembly import assemble
from fedsim.methods.part_settings import make, validated, values_for
from fedsim.methods.recipe import LIST_SLOTS, SLOTS, Recipe, changed_fields, values_of
from fedsim.methods.registry import is_shipped, outside
from fedsim.parts.part import Part, named_part, part_name
from fedsim.settings.experiment import Experiment

LONGEST = 120  # characters; a folder's name holds 255 bytes, and the method's name and run.label are in it too


def method_label(experiment: Experiment, recipe: Recipe | None = None) -> str:
    """`fedprox@proximal.mu=0.01`: the method, and what the recipe changes in its row; raises UserError like a recipe.

    The values of `[parts]` belong to the experiment and are not changes. A setting that repeats the row's own value is
    not a change either, so that equal recipes have equal labels, even if their settings differ.
    """
    return "@".join(filter(None, (experiment.method_name, variant_words(experiment, recipe))))


def same_method(record: Experiment, asked: Experiment) -> bool:
    """Whether two experiments of one data set have the same recipe, even if their settings differ.

    A record that names a module which the experiment does not name is of another recipe: it may be somebody else's, and
    is not imported.
    """
    if record.method == asked.method:
        return True
    if not set(outside(record)) <= set(outside(asked)):
        return False
    try:
        return method_label(record) == method_label(asked)
    except UserError:  # a method or part of the record does not exist here
        return False


def variant_words(experiment: Experiment, recipe: Recipe | None = None) -> str:
    """A text like `add=guiding_head,guiding_head.weight=0.25`, in the order of the slots; empty for the row itself.

    recipe: that of the experiment, where it has been assembled already
    """
    recipe = recipe or assemble(experiment.method, experiment.parts)
    values = values_for(recipe, experiment.parts)
    row = assemble({"name": experiment.method_name}, {})
    in_row = {part_name(part) for _, part in row.pairs} & values.keys()
    row = assemble({"name": experiment.method_name}, {name: values[name] for name in in_row}) if in_row else row
    added: list[str] = []
    changes: list[str] = []
    for slot in SLOTS:
        before, after = ([_full_name(part) for part in half.parts_in(slot)] for half in (row, recipe))
        if slot in LIST_SLOTS and after[: len(before)] == before:
            added += [name for name in after[len(before) :] if name not in [*added, *_required(recipe, slot)]]
        elif before != after:
            changes.append(f"{slot}={'+'.join(after) or 'none'}")
    if added:
        changes.append(f"add={'+'.join(added)}")
    for part in recipe.of(Part):
        changes += _field_words(part, _reference(part, row, values.get(part_name(part), {})))
    return _short(",".join(changes))


def recipe_record(experiment: Experiment, recipe: Recipe) -> dict[str, dict]:
    """What environment.json has of a run's recipe: the values of all fields, and `defaults`, in the tables of the
    settings: those that the recipe would have without the settings, by which a value that repeats one is known."""
    method = {key: value for key, value in experiment.method.items() if key in ("name", "add", *SLOTS)}
    plain = assemble(method, {}).named
    fields = {key: fields for key, fields in experiment.method.items() if key not in method}
    tables = {
        section: {
            key: {field: getattr(plain[named_part(key)], field) for field in fields}
            for key, fields in given.items()
            if named_part(key) in plain
        }
        for section, given in (("parts", experiment.parts), ("method", fields))
    }
    defaults = {section: table for section, table in tables.items() if table}
    return {"recipe": values_of(recipe)} | ({"defaults": defaults} if defaults else {})


def _required(recipe: Recipe, slot: str) -> list[str]:
    """The names of parts that another part adds."""
    return [part.requires[slot].replace(":", ".") for _, part in recipe.pairs if slot in part.requires]


def _full_name(part: Part) -> str:
    """The settings name of a shipped part; for others module and class, because shipped parts may have their names."""
    kind = type(part)
    return part_name(part) if is_shipped(kind) else f"{kind.__module__}.{kind.__name__}"


def _reference(part: Part, row: Recipe, values: JsonTable) -> Part:
    """The row's part of that class, or if there is none, a new one with the experiment's own values."""
    of_row = [present for _, present in row.pairs if type(present) is type(part)]
    return of_row[0] if of_row else validated(make(type(part)), values, f"parts.{part_name(part)}")


def _field_words(part: Part, reference: Part) -> list[str]:
    """`name.field=value` for every field in which two parts of one class differ."""
    return [f"{part_name(part)}.{name}={_text(value)}" for name, value in changed_fields(part, reference).items()]


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return "+".join(_text(each) for each in value) or "none"
    return (
        str(value).lower() if isinstance(value, bool) else f"{value:.12g}" if isinstance(value, float) else str(value)
    )


def _short(words: str) -> str:
    """The text as a part of a folder's name. Unsuitable characters are replaced; then a hash of the text is added."""
    plain = re.sub(r"[^\w.,=+-]+", "_", words)[:LONGEST]
    return plain if plain == words else f"{plain}~{hashlib.sha256(words.encode()).hexdigest()[:8]}"
