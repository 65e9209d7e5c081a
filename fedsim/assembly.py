"""From `[method]` settings to a checked recipe and its network: combining rows, exchanging parts, setting fields."""

import dataclasses
import functools
from typing import Any

import pydantic
from torch import nn

from fedsim.arrays import nonnegative_names
from fedsim.combinations import check_recipe
from fedsim.data import benchmark
from fedsim.errors import UserError
from fedsim.experiment import Experiment, nearest
from fedsim.methods import METHODS, PARTS
from fedsim.models import build_model
from fedsim.recipe import LIST_SLOTS, SLOTS, Recipe, part_name, parts_of


def build_recipe(experiment: Experiment) -> Recipe:
    """The recipe of `[method]`, with its overrides; UserError for unknown names and for parts that do not fit."""
    settings = dict(experiment.method)
    name = settings.pop("name")
    recipe = functools.reduce(combine, [(part, _row(part)) for part in name.split("+")])[1]
    added = settings.pop("add", [])
    for key in [key for key in settings if key in PARTS]:
        recipe = _exchange(recipe, key, settings.pop(key))
    for part in [added] if isinstance(added, str) else added:
        slot, kind = _find_part(part)
        recipe = dataclasses.replace(
            recipe, **{slot: (*getattr(recipe, slot), kind()) if slot in LIST_SLOTS else kind()}
        )
    recipe = _complete(recipe)
    present = {part_name(part) for _, part in parts_of(recipe)}
    for key, fields in experiment.parts.items():
        _find_part(key)
        if key in present and key not in settings:
            recipe = _set_fields(recipe, key, fields, name)
        elif key in present and isinstance(settings[key], dict):
            settings[key] = {**fields, **settings[key]}
    for key, fields in settings.items():
        recipe = _set_fields(recipe, key, fields, name)
    check_recipe(recipe, name)
    for _, part in parts_of(recipe):
        part.check(experiment)
    return recipe


def _row(name: str) -> Recipe:
    if name not in METHODS:
        raise UserError(f"unknown method {name!r}; {nearest(name, METHODS)}known: {', '.join(METHODS)}")
    return METHODS[name]


def combine(a: tuple[str, Recipe], b: tuple[str, Recipe]) -> tuple[str, Recipe]:
    """Both rows in one: lists are joined, a part that differs from FedAvg's wins; two different ones are refused."""
    changes: dict[str, Any] = {}
    for slot in SLOTS:
        first, second, standard = getattr(a[1], slot), getattr(b[1], slot), getattr(Recipe(), slot)
        if slot in LIST_SLOTS:
            changes[slot] = first + tuple(part for part in second if part not in first)
        elif second != standard and first not in (standard, second):
            raise UserError(
                f"{a[0]} and {b[0]} cannot be combined: {slot} is {part_name(first)} in one and "
                f"{part_name(second)} in the other"
            )
        else:
            changes[slot] = second if second != standard else first
    changes["pooled"] = a[1].pooled or b[1].pooled
    for text in ("paper", "discloses"):
        changes[text] = "; ".join(dict.fromkeys(value for value in (getattr(a[1], text), getattr(b[1], text)) if value))
    return f"{a[0]}+{b[0]}", Recipe(**changes)


def _find_part(name: Any, slot: str = "") -> tuple[str, type]:
    known = {part_name(kind): (key, kind) for key, kinds in PARTS.items() if slot in ("", key) for kind in kinds}
    if name not in known:
        raise UserError(
            f"method{'.' + slot if slot else ''}: no part {name!r}; {nearest(str(name), known)}"
            f"known: {', '.join(known) or 'none'}"
        )
    return known[name]


def _exchange(recipe: Recipe, slot: str, value: Any) -> Recipe:
    """Recipe with the parts of one slot replaced by named ones; `"none"` empties an optional slot."""
    if slot in LIST_SLOTS:
        names = [value] if isinstance(value, str) else value
        return dataclasses.replace(recipe, **{slot: tuple(_find_part(name, slot)[1]() for name in names)})
    if slot == "augment" and value == "none":
        return dataclasses.replace(recipe, augment=None)
    kind = _find_part(value, slot)[1]
    return recipe if isinstance(getattr(recipe, slot), kind) else dataclasses.replace(recipe, **{slot: kind()})


def _complete(recipe: Recipe) -> Recipe:
    """Adds what a part requires and the recipe lacks: `requires = {"reports": "generalization_gap"}`."""
    for _, part in parts_of(recipe):
        for slot, name in part.requires.items():
            kind = _find_part(name, slot)[1]
            if not any(isinstance(present, kind) for present in getattr(recipe, slot)):
                recipe = dataclasses.replace(recipe, **{slot: (*getattr(recipe, slot), kind())})
    return recipe


def _set_fields(recipe: Recipe, key: str, fields: Any, method: str) -> Recipe:
    """Recipe with fields of the part called `key` changed and checked."""
    present = {part_name(part): (slot, part) for slot, part in parts_of(recipe)}
    if key not in present:
        hint = (
            " (add it with method.add)"
            if key in {part_name(kind) for kinds in PARTS.values() for kind in kinds}
            else ""
        )
        raise UserError(
            f"method {method!r} has no part {key!r}{hint}; {nearest(key, present)}it has: {', '.join(present)}"
        )
    if not isinstance(fields, dict):
        raise UserError(f"method.{key} is a part; set its fields, e.g. method.{key}.FIELD={fields!r}")
    slot, part = present[key]
    known = [field.name for field in dataclasses.fields(part)]
    for field in fields:
        if field not in known:
            raise UserError(f"method.{key} has no field {field!r}; {nearest(field, known)}known: {', '.join(known)}")
    values = {field: getattr(part, field) for field in known} | fields
    try:
        changed = pydantic.TypeAdapter(type(part)).validate_python(values)
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        raise UserError(f"method.{key}.{problem['loc'][0]}: {problem['msg']} (got {problem['input']!r})") from None
    value = (
        tuple(changed if member is part else member for member in getattr(recipe, slot))
        if slot in LIST_SLOTS
        else changed
    )
    return dataclasses.replace(recipe, **{slot: value})


def build_net(experiment: Experiment, recipe: Recipe) -> nn.Module:
    """The experiment's network with the recipe's normalisation, from the run's seed."""
    bench = benchmark(experiment.data)
    net = build_model(
        experiment.model,
        len(bench.classes),
        bench.channels,
        experiment.data.image_size,
        recipe.norm,
        experiment.run.seed,
    )
    for part in recipe.inserts:
        part.apply(net)
    if recipe.client.needs_levels and not net.levels:
        raise UserError(
            f"{part_name(recipe.client)} aligns convolutional feature maps, and {experiment.model.backbone} "
            "has none; use a ResNet, DenseNet, AlexNet or the digits CNN"
        )
    _check_privacy(experiment, recipe, net)
    return net


def _check_privacy(experiment: Experiment, recipe: Recipe, net: nn.Module) -> None:
    """Noise needs tensors that survive it, and a client must not send anything beside its perturbed model."""
    local = experiment.train.dp_clip > 0
    if (recipe.fuse.perturbs or local) and nonnegative_names(net):
        raise UserError(
            f"differential privacy perturbs every tensor, and the batch-norm statistics of {experiment.model.backbone} "
            "do not survive it; use a backbone without batch norm (digits-cnn, alexnet, vit-b-16)"
        )
    if local and recipe.banks:
        raise UserError(
            f"train.dp_clip perturbs the model alone, and a {part_name(recipe.banks[0])} would leave the client as it "
            "is; use a method without banks"
        )


def find_recipe(name: str) -> Recipe:
    """Recipe of a row or a combination `a+b`, with the papers' values."""
    return build_recipe(Experiment(method={"name": name}))
