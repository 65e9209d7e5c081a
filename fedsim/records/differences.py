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
    settings = {}
    for key, value in recorded_settings(experiment).items():
        is_of_run = key.startswith("run.") and key not in RUN_KEYS
        if not is_of_run and key not in MACHINE_KEYS:
            settings[key] = value
    return settings


def with_values(experiment: Experiment, values: PartValues) -> Experiment:
    """The settings with these values of parts where they give none; values: {"parts" or "method": {part: fields}}."""
    changes = {}
    for section, parts in values.items():
        given = dict(getattr(experiment, section))
        for part, fields in parts.items():
            given[part] = {**fields, **given.get(part, {})}
        changes[section] = given
    return experiment.model_copy(update=changes)


def with_recorded_values(
    experiments: Mapping[str, Experiment], recipe_of: Callable[[str], Recipe]
) -> dict[str, Experiment]:
    """The settings of runs, with the values of [parts] that one of them gives as each run's own recipe has them.

    A run that left a value out is then not told apart from one that repeats the default, and 1 is the number 1.0.
    """
    given: dict[str, set[str]] = {}  # {part: the fields that a run gives}
    for experiment in experiments.values():
        for part, fields in experiment.parts.items():
            given.setdefault(part, set()).update(fields)
    if not given:
        return dict(experiments)
    filled = {}
    for run, experiment in experiments.items():
        recipe = _by_part(recipe_of(run))
        parts = {part: dict(fields) for part, fields in experiment.parts.items()}
        for part, names in given.items():
            recorded = recipe.get(named_part(part), {})
            for name in names & recorded.keys():
                if parts.get(part, {}).get(name, recorded[name]) == recorded[name]:
                    parts.setdefault(part, {})[name] = recorded[name]
        filled[run] = experiment.model_copy(update={"parts": parts})
    return filled


def _by_part(recipe: Recipe) -> Recipe:
    """A recorded recipe by the names of its parts alone: `objective.jigsaw` as `jigsaw`."""
    return {name.split(".", 1)[1]: fields for name, fields in recipe.items()}


def used_settings(experiment: Experiment, record: Mapping[str, Any]) -> Experiment:
    """The settings without those of parts that the recipe in a run's record (environment.json) does not have."""
    recipe = _by_part(record.get("recipe", {}))
    if not recipe:
        return experiment
    parts = {part: fields for part, fields in experiment.parts.items() if named_part(part) in recipe}
    return experiment.model_copy(update={"parts": parts})


def value_text(value: Any) -> str:
    """A setting's value as it is typed in an override."""
    return value if isinstance(value, str) else json.dumps(value)


def differing_settings(experiments: Iterable[Experiment], between_methods: bool = False) -> dict[str, list[str]]:
    """The keys in which runs differ, with their values. A method's own settings are left out: its label names them.

    between_methods: also TESTED_KEYS in which only different methods differ, not the runs of one.
    """
    tables = [(experiment.method_name, comparable_settings(experiment)) for experiment in experiments]
    keys: dict[str, None] = {}
    for _, settings in tables:
        keys |= dict.fromkeys(settings)
    differing: dict[str, list[str]] = {}
    for key in keys:
        texts = [(method, value_text(settings.get(key, ABSENT))) for method, settings in tables]
        values = list(dict.fromkeys(text for _, text in texts))
        is_one_each = len(set(texts)) == len({method for method, _ in texts})  # no method has two values
        is_allowed = key in TESTED_KEYS and is_one_each and not between_methods
        if len(values) > 1 and not is_allowed and not key.startswith("method."):
            differing[key] = values
    return differing


def differing_parts(first: Recipe, second: Recipe) -> list[str]:
    """What differs between two recorded recipes: the parts of one alone, and fields that both know, with their values.

    A field that only one of the records has came with another version, and its default is what was done before, except
    for those of NEW_RULES.
    """
    first, second = _by_former_slots(first), _by_former_slots(second)
    apart = [f"{name} (not in both)" for name in first.keys() ^ second.keys()]
    for name in first.keys() & second.keys():
        one, other = first[name], second[name]
        rule = NEW_RULES.get(name)
        if (rule in one) != (rule in other):
            apart.append(f"{name} (it computes something else than in earlier versions)")
        for field in one.keys() & other.keys():
            before, after = value_text(one[field]), value_text(other[field])
            if before != after:
                apart.append(f"{name}.{field} ({before} | {after})")
    return sorted(apart)


def _by_former_slots(recipe: Recipe) -> Recipe:
    """A recorded recipe with `objective.jigsaw` as `client.jigsaw`, as earlier versions recorded it."""
    former = {}
    for key, fields in recipe.items():
        slot, part = key.split(".", 1)
        is_local = slot in ("client", *FORMER_CLIENT)
        if not is_local:
            former[key] = fields
        elif part not in STANDARD:
            former[f"client.{part}"] = fields
    return former


def method_words(experiment: Experiment) -> str:
    """`guiding_head.weight=0.25`: the settings of a method as they were given."""
    settings = flatten({key: value for key, value in experiment.method.items() if key != "name"})
    return ",".join(f"{key}={value_text(value)}" for key, value in sorted(settings.items()))


def words_apart(settings: Mapping[str, str], recipes: Mapping[str, Recipe]) -> dict[str, str]:
    """What tells apart the runs of one label: their settings, of runs with the same recipe the shortest ones.

    Empty where all have the same recipe.
    settings: {run: its settings as text}; recipes: {run: its recorded recipe, empty where there is none}.
    """
    texts: dict[str, str] = {}
    firsts: list[str] = []  # the run with the shortest settings of each recipe
    for run in sorted(settings, key=lambda run: len(settings[run])):
        recipe = recipes[run]
        alike = [other for other in firsts if recipe and recipes[other] and not differing_parts(recipes[other], recipe)]
        if not alike:
            firsts.append(run)
        texts[run] = settings[alike[0] if alike else run]
    return texts if len(set(texts.values())) > 1 else dict.fromkeys(texts, "")


def require_alike(
    experiments: Sequence[Experiment],
    by: Sequence[str] = (),
    unused: Collection[tuple[str, str]] = (),
) -> None:
    """Raise UserError naming the keys in which runs differ beyond method, target, seed and the keys of `by`.

    A part in [parts] that no method of these runs has changes nothing, so that the runs may differ in it.
    unused: (method, part) for parts in [parts] that the method's recipe does not have (`Runs.unused_parts`)
    """
    keys: dict[str, None] = {}
    for experiment in experiments:
        keys |= dict.fromkeys(recorded_settings(experiment))
    for key in by:
        if key not in keys:
            raise UserError(f"no run has the setting {key!r}; {nearest(key, keys)}keys are dotted, such as train.lr")
    methods = {experiment.method_name for experiment in experiments}
    idle = set()  # parts that no method has
    for _, part in unused:
        if all((method, part) in unused for method in methods):
            idle.add(part)
    differing = []
    options = []
    for key, values in differing_settings(experiments).items():
        if key not in by and _part_of(key) not in idle:
            differing.append(f"{key} ({' | '.join(values)})")
            options.append(f"--by {key}")
    if differing:
        raise UserError(
            f"these runs differ in more than method, target and seed: {', '.join(differing)}; "
            f"say which difference is meant with {' '.join(options)}, or compare one experiment's folder at a time"
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
    if twice.empty:
        return
    first = twice.iloc[0]
    is_same = (twice[keys] == first[keys]).all(axis=1)
    runs = list(twice.loc[is_same, "run"])
    advice = "compare one experiment's folder at a time"
    keys_apart = _run_keys_apart([recorded_settings(experiments[run]) for run in runs]) if experiments else []
    if keys_apart:
        options = " ".join(f"--by {key}" for key in keys_apart)
        advice += f", or tell these runs apart with {options}"
    raise UserError(
        f"{first['label']} on {first['target']} with seed {first['seed']} is there more than once: "
        f"{', '.join(runs)}; {advice}"
    )


def _run_keys_apart(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys of [run] in which some runs differ. A sweep's grid writes its settings into the label, too."""
    keys = []
    for key in tables[0]:
        values = {value_text(table.get(key, ABSENT)) for table in tables}
        if key.startswith("run.") and len(values) > 1:
            keys.append(key)
    return [key for key in keys if key != "run.label"] or keys


def variants(
    experiments: Mapping[str, Experiment],
    by: Sequence[str],
    unused: Collection[tuple[str, str]] = (),
) -> dict[str, tuple[str, ...]]:
    """{run: its values of the `by` keys}: empty where its method has no such key, `default` where it was left out.

    unused: (method, part) for parts in [parts] that the method's recipe does not have (`Runs.unused_parts`)
    """
    if not by:
        return dict.fromkeys(experiments, ())
    settings = {run: recorded_settings(experiment) for run, experiment in experiments.items()}
    methods = {run: experiment.method_name for run, experiment in experiments.items()}
    with_key = set()  # (method, key) where a run of the method has the key
    for run, method in methods.items():
        for key in by:
            if key in settings[run] and (method, _part_of(key)) not in unused:
                with_key.add((method, key))
    values: dict[str, tuple[str, ...]] = {}
    for run, method in methods.items():
        texts = []
        for key in by:
            has_key = (method, key) in with_key
            texts.append(value_text(settings[run].get(key, ABSENT)) if has_key else "")
        values[run] = tuple(texts)
    return values


def variant_text(by: Sequence[str], values: Sequence[str]) -> str:
    """`weight=0.25, lr=0.01`"""
    texts = []
    for name, value in zip(short_names(by), values):
        if value:
            texts.append(f"{name}={value}")
    return ", ".join(texts)


def short_names(keys: Sequence[str]) -> list[str]:
    """`method.proximal.mu` -> `mu`, unless another key ends alike."""
    last = [key.rpartition(".")[2] for key in keys]
    names = []
    for key, name in zip(keys, last):
        names.append(key if last.count(name) > 1 else name)
    return names
