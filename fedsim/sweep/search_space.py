"""What a search varies: the settings of `--space`, or those that a method declares, and their values in the file."""

from collections.abc import Callable, Sequence
from typing import Any

from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe
from fedsim.methods.part_settings import method_facts
from fedsim.methods.recipe import LIST_SLOTS, SLOTS, Recipe
from fedsim.parts.part import part_name
from fedsim.results.differences import ABSENT
from fedsim.settings.experiment import Experiment, overlap, parse_override
from fedsim.settings.tuned import spaces
from fedsim.sweep.axes import OPTIONS
from fedsim.sweep.search import FORMS, Knob, read_space


def find_space(words: Sequence[str], experiment: Experiment, overrides: Sequence[str]) -> list[Knob]:
    """The settings of `--space`, or the declared ones that `--set` leaves open; UserError when there are none."""
    knobs = read_space(words or declared_space(experiment))
    if not words:
        given = [parse_override(word)[0] for word in overrides]
        knobs = [knob for knob in knobs if not any(overlap(knob.key, key) for key in given)]
    if not knobs:
        method = experiment.method_name
        raise UserError(f"--set leaves no declared setting of {method} open; a search needs a --space {FORMS}")
    _refuse_overridden(knobs, overrides)
    return knobs


def declared_space(experiment: Experiment) -> list[str]:
    """The spaces that [train] and the parts of a method declare (`settings/tuned.py`), as `--space` takes them."""
    recipe = build_recipe(experiment)
    facts = method_facts(recipe)
    found = {f"train.{name}": own for name, own in spaces(experiment.train, facts).items()}
    for _, part in recipe.pairs:
        found |= {f"method.{part_name(part)}.{name}": own for name, own in spaces(part, facts).items()}
    return [f"{key}={own.space}" for key, own in found.items()]


def _refuse_overridden(knobs: Sequence[Knob], overrides: Sequence[str]) -> None:
    """UserError for a setting that is given in two ways."""
    for key, value in map(parse_override, overrides):
        if key in OPTIONS:
            option = OPTIONS[key].replace("--methods", "--method")
            raise UserError(f"--set {key}={value}: a search takes this from {option}; use {option} {value}")
        searched = [knob.text for knob in knobs if overlap(knob.key, key)]
        if searched:
            raise UserError(f"--space {searched[0]}: --set gives {key} one value too; remove one of the two")


def own_values(knobs: Sequence[Knob], read: Callable[..., Experiment]) -> dict[str, Any]:
    """The file's own value of each setting; UserError when the method lacks one, or when a space leaves its bounds."""
    from fedsim.run.plan import resolve

    for knob in knobs:
        try:
            for text in knob.ends:
                resolve(read(f"{knob.key}={text}"))
        except UserError as error:
            raise UserError(f"--space {knob.text}: {error}") from None
    plan = resolve(read())
    return {knob.key: _own_value(knob, plan.experiment, plan.recipe) for knob in knobs}


def _own_value(knob: Knob, experiment: Experiment, recipe: Recipe) -> Any:
    """The value that a setting has without the search, as an override would give it."""
    section, *path = knob.key.split(".")
    if section == "method" and path[0] in SLOTS:
        names = [part_name(part) for part in recipe.parts_in(path[0])]
        return names if path[0] in LIST_SLOTS else names[0] if names else "none"
    if section == "parts" or (section == "method" and len(path) > 1):
        present = recipe.named
        if path[0] not in present:
            raise UserError(f"--space {knob.text}: {experiment.method_name} has no part {path[0]!r}; it has: "
                            f"{', '.join(present)}")  # fmt: skip
        value = getattr(present[path[0]], path[1])
        return list(value) if isinstance(value, tuple) else value
    value = experiment.model_dump()[section]
    for name in path:
        value = value.get(name, ABSENT)
    return value
