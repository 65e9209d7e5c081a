"""What `[method]` and `[parts]` change in a recipe: they replace or add parts, and set and check their fields."""

import dataclasses
import functools
import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence

import pydantic

from fedsim.common.errors import UserError, nearest
from fedsim.common.values import Json, JsonTable
from fedsim.methods.docstrings import field_texts
from fedsim.methods.recipe import LIST_SLOTS, SLOTS, Filled, Recipe, slots_of
from fedsim.methods.registry import find_part
from fedsim.parts.part import Part, part_name, unfit
from fedsim.settings.effect import Facts, Trait, conditions, in_words
from fedsim.settings.experiment import parse_override
from fedsim.settings.tuned import spaces


def exchange(recipe: Recipe, slot: str, value: Json) -> Recipe:
    """The recipe with the parts of one slot replaced by named ones; `"none"` empties an optional slot."""
    if slot in LIST_SLOTS:
        names = [] if value == "none" else _names(f"method.{slot}", value)
        return _with(recipe, slot, [_made(name, slot, recipe) for name in names])
    if isinstance(value, dict | list):
        hint = f"it takes one part, method.{slot}='NAME'"
        if isinstance(value, dict):  # as in method.weights.d=0.5, where the user means a field of the part in that slot
            present = part_name(getattr(recipe, slot)) if getattr(recipe, slot) else "PART"
            hint += (
                f"; a part's field is set by the part's name, e.g. method.{present}.{next(iter(value), 'FIELD')}=..."
            )
        raise UserError(f"method.{slot} is a slot: {hint}")
    empty = value == "none" and getattr(Recipe(), slot) is None
    return _with(recipe, slot, [] if empty else [_made(value, slot, recipe)])


def add(recipe: Recipe, value: Json, given: Mapping[str, Json]) -> Recipe:
    """The recipe with the named parts added to every slot that they belong to.

    Raises UserError for a part that the recipe already has, and for a second one in a slot that `given` fills.
    """
    names = _names("method.add", value)
    filled = {slot: name for slot, name in given.items() if slot in SLOTS and slot not in LIST_SLOTS and name != "none"}
    for name in names:
        kind = find_part(name)
        for slot in slots_of(kind):
            if any(type(part) is kind for part in recipe.parts_in(slot)):
                raise UserError(f"method.add: the method has {name} already; set its fields with method.{name}.FIELD")
            if slot in filled:
                raise UserError(f"method.add: {filled[slot]} and {name} are both for {slot}, which takes one part")
            if slot not in LIST_SLOTS:
                filled[slot] = name
            recipe = _with(recipe, slot, [*recipe.parts_in(slot), make(kind)])
    return recipe


def complete(recipe: Recipe) -> Recipe:
    """The recipe with the missing parts that its parts require, and with those that the new parts require in turn.

    An example is `requires = {"reports": "generalization_gap"}`.
    """
    for _, part in recipe.pairs:
        for slot, name in part.requires.items():
            present = recipe.parts_in(slot)
            if any(part_name(other) == name for other in present):
                continue
            kind = _beside(part, name) or find_part(name, slot)  # a name with a colon, or of an entry point, is no
            if not any(type(other) is kind for other in present):  # settings name
                return complete(_with(recipe, slot, [*present, make(kind)]))
    return recipe


def _beside(part: Part, name: str) -> type | None:
    """The class of a part with that settings name in the module that defines `part`, for a user's own modules."""
    kinds = vars(sys.modules[type(part).__module__]).values()
    return next((kind for kind in kinds if isinstance(kind, type) and slots_of(kind) and part_name(kind) == name), None)


def set_fields(recipe: Recipe, key: str, fields: Json, method: str) -> Recipe:
    """The recipe with fields of the part called `key` changed and checked, in every slot that has the part."""
    present = recipe.named
    if key not in present:
        raise UserError(
            f"method {method!r} has no part {key!r}{_hint(key)}; {nearest(key, present)}it has: {', '.join(present)}"
        )
    part = present[key]
    check_field_names(f"method.{key}", type(part), fields)
    changed = validated(part, fields, f"method.{key}")
    for slot in [slot for slot, member in recipe.pairs if type(member) is type(part)]:
        members = [changed if type(member) is type(part) else member for member in recipe.parts_in(slot)]
        recipe = _with(recipe, slot, members)
    return recipe


def values_for(recipe: Recipe, values: Mapping[str, Json]) -> dict[str, JsonTable]:
    """The values of `[parts]` for the parts that the recipe has, by settings name; UserError for any that are wrong.

    They belong to a data set and are used by every method that has the part. A part from outside may be named by its
    settings name where the recipe has it, and everywhere as `module:Class` or by the name of its entry point.
    """
    present = recipe.named
    spelled: dict[type, str] = {}
    found: dict[str, JsonTable] = {}
    for key, fields in values.items():
        kind = type(present[key]) if key in present else _kind_of_values(key)
        if other := spelled.get(kind):
            raise UserError(f"parts.{other} and parts.{key} are one part; write all its values under one name")
        spelled[kind] = key
        part = next((part for part in present.values() if type(part) is kind), None)
        check_field_names(f"parts.{key}", kind, fields)
        validated(part or make(kind), fields, f"parts.{key}")
        if part is not None:
            found[part_name(part)] = fields
    return found


def _kind_of_values(key: str) -> type:
    """The class that a key of `[parts]` names."""
    try:
        return find_part(key)
    except UserError as error:
        hint = "" if ":" in key else f'; where a part is from your own module, write [parts."module:Class"] for {key}'
        raise UserError(f"parts.{key}: {error}{hint}") from None


def check_field_names(where: str, kind: type, fields: Json) -> None:
    """Raise UserError for a key that is not a field of the part."""
    if not isinstance(fields, dict):
        raise UserError(f"{where} is a part; set its fields, e.g. {where}.FIELD={toml_value(fields)}")
    known = [field.name for field in dataclasses.fields(kind)]
    for field in fields:
        if field not in known:
            raise UserError(
                f"{where} has no field {field!r}; {nearest(field, known)}known: {', '.join(known) or 'none'}"
            )


def validated(part: Part, fields: JsonTable, where: str) -> Part:
    """The part with `fields` changed; UserError in one line for a value of a wrong type or outside its range."""
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)} | fields
    for field, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{where}.{field}: must be a finite number (got {value!r})")
    try:
        # JSON, because its strict mode accepts a list for a tuple, but neither a bool nor a text for a number
        kind: type = type(part)
        return _adapter(kind).validate_json(json.dumps(values), strict=True)
    except TypeError as error:
        raise UserError(f"{where}: fields hold numbers, texts, booleans or lists of them ({error})") from None
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(str(word) for word in problem["loc"][:1])
        right = {"bool_type": "true or false", "tuple_type": f"a list such as {toml_value(getattr(part, field, []))}"}
        hint = f"; write {right[problem['type']]}" if problem["type"] in right else ""
        raise UserError(f"{where}.{field}: {problem['msg']} (got {problem['input']!r}){hint}") from None


def toml_value(value: Json) -> str:
    """A field's value as it is written in TOML and after the sign of `--set`: `true`, `[1, 2]`, `"softmax"`."""
    return json.dumps(value, ensure_ascii=False, default=str)


@functools.cache
def _adapter(kind: type) -> pydantic.TypeAdapter:
    return pydantic.TypeAdapter(kind)


def typed(key: str, value: Json) -> str:
    """`key=value` as it is typed after `--set` in a shell."""
    plain = isinstance(value, str) and parse_override(f"{key}={value}")[1] == value
    return shlex.quote(f"{key}={value if plain else toml_value(value)}")


def method_facts(recipe: Recipe) -> Facts:
    """What a method's parts say about the effect of settings."""
    return {
        Trait.PASSES: not recipe.batches.balanced or not getattr(recipe.batches, "budget", 1),
        Trait.XAN: part_name(recipe.norm) == "xan",
        Trait.FEDERATED: not recipe.pooled,
        Trait.PLAIN_PASS: all(part.compiles for part in recipe.client_parts()),
    }


def explained(part: Part, facts: Facts) -> dict[str, str]:
    """{field: its range, unless its meaning names all values; its meaning; where it has an effect; from what a search
    draws it; the part's default, where the value is another}."""
    kind: type = type(part)
    texts, schema = field_texts(kind), _adapter(kind).json_schema().get("properties", {})
    settings, drawn = {}, spaces(part, facts)
    for field in dataclasses.fields(part):
        text, values = texts[field.name], schema[field.name].get("enum")
        shown = values and all(str(value) in text for value in values)
        words = [text] if shown else [_range(schema[field.name]), text]
        if needs := conditions(kind).get(field.name, ()):
            value = getattr(part, field.name)
            idle = not any(one.holds(part, facts, (value,)) for one in needs)
            begin = "it has no effect here, only with " if idle else "it has an effect only with "
            words.append(begin + in_words(needs))
        if field.name in drawn:
            words.append(f"a search draws it from {drawn[field.name].words()}")
        if field.default != getattr(part, field.name):
            words.append(f"the part's default is {toml_value(field.default)}")
        settings[field.name] = "; ".join(word.rstrip(".") for word in words if word)
    return settings


def _range(schema: Mapping[str, Json]) -> str:
    """A field's JSON schema in words: `number >= 0 and < 1`, `"s" or "a"`."""
    if "enum" in schema or "const" in schema:
        return " or ".join(map(toml_value, schema.get("enum", [schema.get("const")])))
    if "anyOf" in schema:
        return " or ".join(map(_range, schema["anyOf"]))
    if schema.get("type") == "array":
        each = [_range(item) for item in schema.get("prefixItems", [schema.get("items", {})])]
        return f"list of {'; '.join(dict.fromkeys(each))}"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = " and ".join(f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema)
    names = {"boolean": "true or false", "integer": "whole number", "string": "text"}
    return " ".join(filter(None, (names.get(schema.get("type", ""), "number"), bounds)))


def make(kind: type) -> Part:
    """A part with its default fields; UserError when a field has no default."""
    try:
        part = kind()
    except TypeError as error:
        raise UserError(f"{part_name(kind)} cannot be added by name: {error}; give its fields default values") from None
    if reason := unfit(part):
        raise UserError(reason)
    return part


def _with(recipe: Recipe, slot: str, parts: Sequence[Part]) -> Recipe:
    """The recipe with these parts in one slot; where it takes one part, the last of them."""
    change: Filled = {slot: tuple(parts) if slot in LIST_SLOTS else parts[-1] if parts else None}
    return dataclasses.replace(recipe, **change)


def _made(name: Json, slot: str, recipe: Recipe) -> Part:
    """The part of that name: the one that the recipe has already, with its fields, or else a new one."""
    kind = find_part(name, slot)
    present = [part for other in (slot, *slots_of(kind)) for part in recipe.parts_in(other)]
    return next((part for part in present if type(part) is kind), None) or make(kind)


def _names(where: str, value: Json) -> list[str]:
    """The names of different parts that a setting gives."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{where} takes names of parts, e.g. {where}=['guiding_head'] (got {value!r})")
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{where}: {name} is named twice; once is enough")
    return names


def _hint(key: str) -> str:
    try:
        find_part(key)
    except UserError:
        return ""
    return " (add it with method.add)"
