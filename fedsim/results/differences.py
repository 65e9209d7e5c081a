"""Finds the settings in which runs differ, as dotted keys, and refuses to mix runs that differ unexpectedly."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from fedsim.common.errors import UserError, nearest
from fedsim.parts.part import named_part
from fedsim.settings.experiment import Experiment

# Settings of [run] on which numbers depend. What follows a failure is none: a note names the runs where clients failed.
RUN_KEYS = ("run.select_on", "run.validation_domain")
MACHINE_KEYS = ("data.root", "data.cache")
# Methods that adapt to the target are tested on fewer images than others; a note of the table says so.
TESTED_KEYS = ("data.adapt_share",)
ABSENT = "default"
Recipe = Mapping[str, Mapping[str, Any]]  # fields by slot and part, as environment.json has them
PartValues = Mapping[str, Mapping[str, Mapping[str, Any]]]


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested table -> {dotted key: value}; a list is one value."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


FORMER_CLIENT = ("objective", "update", "companions")  # slots whose parts were in `client` before
STANDARD = ("supervised_loss", "one_gradient", "supervised_step")  # what these slots have where a row says nothing
NEW_RULES = {"infer.recompute": "batch"}  # parts that do something else since they have this field


def recorded_settings(experiment: Experiment) -> dict[str, Any]:
    """All dotted settings of a run, except method name, target and seed."""
    settings = flatten(experiment.model_dump(exclude={"name"}))
    return {key: value for key, value in settings.items() if key not in ("method.name", "run.target", "run.seed")}


def comparable_settings(experiment: Experiment) -> dict[str, Any]:
    """Dotted settings that a run's numbers depend on, except method name, target and seed."""
    settings = recorded_settings(experiment)
    idle = {key for key in settings if key.startswith("run.")}.difference(RUN_KEYS).union(MACHINE_KEYS)
    return {key: value for key, value in settings.items() if key not in idle}


def with_values(experiment: Experiment, values: PartValues) -> Experiment:
    """The settings with these values of parts where they give none; values: {"parts" or "method": {part: fields}}."""
    changes = {}
    for section, parts in values.items():
        own = getattr(experiment, section)
        changes[section] = {**own, **{part: {**fields, **own.get(part, {})} for part, fields in parts.items()}}
    return experiment.model_copy(update=changes)


def with_recorded_values(
    experiments: Mapping[str, Experiment], recipe_of: Callable[[str], Recipe]
) -> dict[str, Experiment]:
    """The settings of runs, with the values of [parts] that one of them gives as each run's own recipe has them.

    A run that left a value out is then not told apart from one that repeats the default, and 1 is the number 1.0.
    """
    given = {(part, field) for one in experiments.values() for part, own in one.parts.items() for field in own}
    filled = dict(experiments)
    for run, experiment in experiments.items() if given else ():
        recipe = {name.split(".", 1)[1]: own for name, own in recipe_of(run).items()}
        parts = {part: dict(fields) for part, fields in experiment.parts.items()}
        for part, field in given:
            own = recipe.get(named_part(part), {})
            if field in own and parts.get(part, {}).get(field, own[field]) == own[field]:
                parts.setdefault(part, {})[field] = own[field]
        filled[run] = experiment.model_copy(update={"parts": parts})
    return filled


def used_settings(experiment: Experiment, record: Mapping[str, Any]) -> Experiment:
    """The settings without those of parts that the recipe in a run's record (environment.json) does not have."""
    known = {name.split(".", 1)[1] for name in record.get("recipe", {})}
    parts = {part: own for part, own in experiment.parts.items() if not known or named_part(part) in known}
    return experiment.model_copy(update={"parts": parts})


def value_text(value: Any) -> str:
    """A setting's value as it is typed in an override."""
    return value if isinstance(value, str) else json.dumps(value)


def differing_settings(experiments: Iterable[Experiment], between_methods: bool = False) -> dict[str, list[str]]:
    """The keys in which runs differ, with their values. A method's own settings are left out: its label names them.

    between_methods: also TESTED_KEYS in which only different methods differ, not the runs of one.
    """
    tables = [(experiment.method_name, comparable_settings(experiment)) for experiment in experiments]
    differing: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for _, table in tables for key in table if not key.startswith("method.")):
        values = list(dict.fromkeys(value_text(table.get(key, ABSENT)) for _, table in tables))
        own = {(method, value_text(table.get(key, ABSENT))) for method, table in tables}
        one_each = len(own) == len({method for method, _ in own})
        if len(values) > 1 and (between_methods or key not in TESTED_KEYS or not one_each):
            differing[key] = values
    return differing


def differing_parts(first: Recipe, second: Recipe) -> list[str]:
    """What differs between two recorded recipes: the parts of one alone, and fields that both know, with their values.

    A field that only one of the records has came with another version, and its default is what was done before, except
    for those of NEW_RULES.
    """
    first, second = _by_former_slots(first), _by_former_slots(second)
    apart = [
        f"{name} (not in both)" for name in dict.fromkeys([*first, *second]) if (name in first) != (name in second)
    ]
    for name in first.keys() & second.keys():
        if (NEW_RULES.get(name) in first[name]) != (NEW_RULES.get(name) in second[name]):
            apart.append(f"{name} (it computes something else than in earlier versions)")
        for field in first[name].keys() & second[name].keys():
            values = [value_text(recipe[name][field]) for recipe in (first, second)]
            if values[0] != values[1]:
                apart.append(f"{name}.{field} ({' | '.join(values)})")
    return sorted(apart)


def _by_former_slots(recipe: Recipe) -> Recipe:
    """A recorded recipe with `objective.jigsaw` as `client.jigsaw`, as earlier versions recorded it."""
    parts = {tuple(name.split(".", 1)): fields for name, fields in recipe.items()}
    local = ("client", *FORMER_CLIENT)
    return {
        f"{'client' if slot in local else slot}.{name}": fields
        for (slot, name), fields in parts.items()
        if not (slot in local and name in STANDARD)
    }


def method_words(experiment: Experiment) -> str:
    """`guiding_head.weight=0.25`: the settings of a method as they were given."""
    settings = {key: value for key, value in experiment.method.items() if key != "name"}
    return ",".join(f"{key}={value_text(value)}" for key, value in sorted(flatten(settings).items()))


def words_apart(settings: Mapping[str, str], recipes: Mapping[str, Recipe]) -> dict[str, str]:
    """What tells apart the runs of one label: their settings, of runs with the same recipe the shortest ones.

    Empty where all have the same recipe.
    settings: {run: its settings as text}; recipes: {run: its recorded recipe, empty where there is none}.
    """
    kinds: list[tuple[Recipe, list[str]]] = []  # (recipe, its runs)
    for run in sorted(settings, key=lambda run: len(settings[run])):
        recipe = recipes[run]
        same = [own for known, own in kinds if recipe and known and not differing_parts(known, recipe)]
        if same:
            same[0].append(run)
        else:
            kinds.append((recipe, [run]))
    words = {run: settings[own[0]] for _, own in kinds for run in own}
    return words if len(set(words.values())) > 1 else dict.fromkeys(words, "")


def require_alike(
    experiments: Sequence[Experiment], by: Sequence[str] = (), unused: Collection[tuple[str, str]] = ()
) -> None:
    """Raise UserError naming the keys in which runs differ beyond method, target, seed and the keys of `by`.

    A part in [parts] that no method of these runs has changes nothing, so that the runs may differ in it.
    unused: (method, part) for parts in [parts] that the method's recipe does not have (`Runs.unused_parts`)
    """
    known = dict.fromkeys(key for experiment in experiments for key in recorded_settings(experiment))
    for key in by:
        if key not in known:
            raise UserError(f"no run has the setting {key!r}; {nearest(key, known)}keys are dotted, such as train.lr")
    methods = {experiment.method_name for experiment in experiments}
    idle = {part for _, part in unused if all((method, part) in unused for method in methods)}
    differing = {key: values for key, values in differing_settings(experiments).items() if key not in by}
    extra = {key: values for key, values in differing.items() if _part_of(key) not in idle}
    if extra:
        named = ", ".join(f"{key} ({' | '.join(values)})" for key, values in extra.items())
        wanted = " ".join(f"--by {key}" for key in extra)
        raise UserError(
            f"these runs differ in more than method, target and seed: {named}; "
            f"say which difference is meant with {wanted}, or compare one experiment's folder at a time"
        )


def _part_of(key: str) -> str:
    """`parts.xan.stages` -> `xan`; empty for a key that is no part's."""
    return key.split(".")[1] if key.startswith("parts.") else ""


def refuse_twice(table: pd.DataFrame, experiments: Mapping[str, Experiment] | None = None) -> None:
    """UserError when several runs fill one cell; table: a row per run with run, label, target, seed.

    experiments: the settings by run; the message says which of [run] they differ in, where `by` can tell them apart.
    """
    keys = ["label", "target", "seed"]
    twice = table[table.duplicated(keys, keep=False)]
    if len(twice):
        first = twice.iloc[0]
        same = twice[(twice[keys] == first[keys]).all(axis=1)]["run"]
        apart = _run_keys_apart([recorded_settings(experiments[run]) for run in same] if experiments else [])
        raise UserError(
            f"{first['label']} on {first['target']} with seed {first['seed']} is there more than once: "
            f"{', '.join(same)}; compare one experiment's folder at a time"
            + (f", or tell these runs apart with {' '.join(f'--by {key}' for key in apart)}" if apart else "")
        )


def _run_keys_apart(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys of [run] in which some runs differ. A sweep's grid writes its settings into the label, too."""
    runs = [key for key in (tables[0] if tables else ()) if key.startswith("run.")]
    keys = [key for key in runs if len({value_text(table.get(key, ABSENT)) for table in tables}) > 1]
    return [key for key in keys if key != "run.label"] or keys


def variants(
    experiments: Mapping[str, Experiment], by: Sequence[str], unused: Collection[tuple[str, str]] = ()
) -> dict[str, tuple[str, ...]]:
    """{run: its values of the `by` keys}: empty where its method has no such key, `default` where it was left out.

    unused: (method, part) for parts in [parts] that the method's recipe does not have (`Runs.unused_parts`)
    """
    settings = {run: recorded_settings(experiment) for run, experiment in experiments.items()} if by else {}
    applies = {(experiments[run].method_name, key) for run, table in settings.items() for key in by if key in table}
    applies = {(method, key) for method, key in applies if (method, _part_of(key)) not in unused}
    return {
        run: tuple(
            value_text(settings[run].get(key, ABSENT)) if (experiment.method_name, key) in applies else "" for key in by
        )
        for run, experiment in experiments.items()
    }


def variant_text(by: Sequence[str], values: Sequence[str]) -> str:
    """`weight=0.25, lr=0.01`"""
    return ", ".join(f"{name}={value}" for name, value in zip(short_names(by), values) if value)


def short_names(keys: Sequence[str]) -> list[str]:
    """`method.proximal.mu` -> `mu`, unless another key ends alike."""
    last = [key.rpartition(".")[2] for key in keys]
    return [key if last.count(name) > 1 else name for key, name in zip(keys, last)]
