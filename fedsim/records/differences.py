"""Finds the settings in which runs differ, as dotted keys, and refuses to mix runs that differ unexpectedly."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedsim.common.errors import UserError, nearest
from fedsim.common.lists import keys_of
from fedsim.common.values import JsonTable
from fedsim.parts.part import named_part
from fedsim.settings.experiment import OF_ROUNDS, Experiment

if TYPE_CHECKING:
    import pandas as pd

LIMITS = ("run.update_limit", "run.examples_limit")  # that refuse replies and sites
# Settings of [run] on which numbers depend. What follows a failure is none: a note names the runs where clients failed.
RUN_KEYS = ("run.select_on", "run.select_by", "run.validation_domain", "run.doubt", *LIMITS)
ATTACKERS = "run.attackers"  # a table, with a key for each client that lies
MACHINE_KEYS = ("data.root", "data.cache")
NUMBERLESS_KEYS = (*MACHINE_KEYS, "data.accept")  # settings of [data] on which no number depends
# Methods that adapt to the target are tested on fewer images than others; a note of the table says so.
TESTED_KEYS = ("data.adapt_share",)
ABSENT = "default"
OF_SERVER = ("data.domains", *(f"train.{name}" for name in OF_ROUNDS))
IDENTITY = ("method.name", "run.target", "run.seed")  # what tells the runs of a study apart
Recipe = Mapping[str, JsonTable]  # fields by slot and part, as environment.json has them
PartValues = Mapping[str, Recipe]  # the same in "parts" and "method", by part
Experiments = Mapping[str, Experiment]  # the settings by run
Unused = Collection[tuple[str, str]]  # (method, part) for parts in [parts] that the method's recipe does not have


def flatten(table: JsonTable, prefix: str = "") -> JsonTable:
    """Nested table -> {dotted key: value}; a list is one value."""
    flat: JsonTable = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def recorded_settings(experiment: Experiment) -> JsonTable:
    """All dotted settings of a run, except method name, target and seed.

    Where clients had an app's own code, settings that act on a client are left out, and the configs are there as `app`.
    """
    settings = flatten(experiment.model_dump(exclude={"name"}))
    for key in IDENTITY:
        settings.pop(key, None)
    if experiment.app is not None:
        settings = {key: value for key, value in settings.items() if not _acts_on_client(key)}
        settings |= flatten({"app": experiment.app})
    return settings


def _acts_on_client(key: str) -> bool:
    """Whether a setting is one of a client's, which an app's own code has itself."""
    return key.startswith(("data.", "model.", "train.")) and key not in OF_SERVER


def _says_nothing(experiment: Experiment, key: str) -> bool:
    """Whether a run's records cannot say anything of a setting, because an app's own code had it, or none had."""
    if experiment.app is None:
        return key.startswith("app.")
    return _acts_on_client(key)


def comparable_settings(experiment: Experiment) -> JsonTable:
    """Dotted settings that a run's numbers depend on, except method name, target and seed."""
    settings = {}
    for key, value in recorded_settings(experiment).items():
        is_of_run = key.startswith("run.") and key not in RUN_KEYS
        is_attacker = key.startswith(ATTACKERS)
        if is_attacker or (not is_of_run and key not in NUMBERLESS_KEYS):
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


def with_recorded_values(experiments: Experiments, recipe_of: Callable[[str], Recipe]) -> dict[str, Experiment]:
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
        parts = _filled_parts(experiment, given, by_part(recipe_of(run)))
        filled[run] = experiment.model_copy(update={"parts": parts})
    return filled


def _filled_parts(experiment: Experiment, given: Mapping[str, set[str]], recipe: Recipe) -> dict[str, JsonTable]:
    """Return the values of [parts] of a run, with those fields of `given` that its recipe has with the same value."""
    parts = {}
    for part, fields in experiment.parts.items():
        parts[part] = dict(fields)
    for part, names in given.items():
        recorded = recipe.get(named_part(part), {})
        for name in names & recorded.keys():
            value = recorded[name]
            if parts.get(part, {}).get(name, value) == value:
                parts.setdefault(part, {})[name] = value
    return parts


def by_part(recipe: Recipe) -> Recipe:
    """A recorded recipe by the names of its parts alone: `objective.jigsaw` as `jigsaw`."""
    fields_of = {}
    for name, fields in recipe.items():
        _, part = name.split(".", 1)
        fields_of[part] = fields
    return fields_of


def used_settings(experiment: Experiment, record: Mapping[str, Any]) -> Experiment:
    """The settings without those of parts that the recipe in a run's record (environment.json) does not have."""
    recipe = by_part(record.get("recipe", {}))
    if not recipe:
        return experiment
    parts = {}
    for part, fields in experiment.parts.items():
        if named_part(part) in recipe:
            parts[part] = fields
    return experiment.model_copy(update={"parts": parts})


def value_text(value: Any) -> str:
    """A setting's value as it is typed in an override."""
    return value if isinstance(value, str) else json.dumps(value)


def differing_settings(experiments: Iterable[Experiment], between_methods: bool = False) -> dict[str, list[str]]:
    """The keys in which runs differ, with their values. A method's own settings are left out: its label names them.

    between_methods: also TESTED_KEYS in which only different methods differ, not the runs of one.
    """
    pairs_of_run = [(experiment, comparable_settings(experiment)) for experiment in experiments]
    differing = {}
    for key in keys_of(table for _, table in pairs_of_run):
        methods = []
        texts = []
        for experiment, table in pairs_of_run:
            if not _says_nothing(experiment, key):
                methods.append(experiment.method_name)
                texts.append(value_text(table.get(key, ABSENT)))
        values = list(dict.fromkeys(texts))
        pairs = set(zip(methods, texts))
        is_one_each = len(pairs) == len(set(methods))  # no method has two values
        is_allowed = key in TESTED_KEYS and is_one_each and not between_methods
        if len(values) > 1 and not is_allowed and not key.startswith("method."):
            differing[key] = values
    return differing


def differing_parts(first: Recipe, second: Recipe) -> list[str]:
    """What differs between two recorded recipes: the parts of one alone, and fields that both know, with their values.

    A field that only one of the records has came with another version, and its default is what was done before.
    """
    apart = [f"{name} (not in both)" for name in first.keys() ^ second.keys()]
    for name in first.keys() & second.keys():
        one, other = first[name], second[name]
        for field in one.keys() & other.keys():
            before = value_text(one[field])
            after = value_text(other[field])
            if before != after:
                apart.append(f"{name}.{field} ({before} | {after})")
    return sorted(apart)


def method_words(experiment: Experiment) -> str:
    """`guiding_head.weight=0.25`: the settings of a method as they were given."""
    settings = flatten(experiment.method)
    del settings["name"]
    texts = [f"{key}={value_text(settings[key])}" for key in sorted(settings)]
    return ",".join(texts)


def require_alike(experiments: Sequence[Experiment], by: Sequence[str] = (), unused: Unused = ()) -> None:
    """Raise UserError naming the keys in which runs differ beyond method, target, seed and the keys of `by`.

    A part in [parts] that no method of these runs has changes nothing, so that the runs may differ in it.
    unused: `Runs.unused_parts`
    """
    keys = keys_of(map(recorded_settings, experiments))
    for key in by:
        if key not in keys:
            raise UserError(f"no run has the setting {key!r}; {nearest(key, keys)}keys are dotted, such as train.lr")
    methods = {experiment.method_name for experiment in experiments}
    idle = set()  # parts that no method has
    for _, part in unused:
        without = [method for method in methods if (method, part) in unused]
        if len(without) == len(methods):
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


def refuse_twice(table: "pd.DataFrame", experiments: Experiments | None = None) -> None:
    """UserError when several runs fill one cell; table: a row per run with run, label, target, seed.

    experiments: the settings by run; the message says which of [run] they differ in, where `by` can tell them apart.
    """
    keys = ["label", "target", "seed"]
    twice = table[table.duplicated(keys, keep=False)]
    if twice.empty:
        return
    first = twice.iloc[0]
    is_same = twice[keys] == first[keys]
    runs = list(twice.loc[is_same.all(axis=1), "run"])
    advice = "compare one experiment's folder at a time"
    if experiments:
        tables = [recorded_settings(experiments[run]) for run in runs]
        options = [f"--by {key}" for key in _run_keys_apart(tables)]
        if options:
            advice += f", or tell these runs apart with {' '.join(options)}"
    raise UserError(
        f"{first['label']} on {first['target']} with seed {first['seed']} is there more than once: "
        f"{', '.join(runs)}; {advice}"
    )


def _run_keys_apart(tables: Sequence[JsonTable]) -> list[str]:
    """The keys of [run] in which some runs differ. A sweep's grid writes its settings into the label, too."""
    keys = []
    for key in tables[0]:
        values = {value_text(table.get(key, ABSENT)) for table in tables}
        if key.startswith("run.") and len(values) > 1:
            keys.append(key)
    without_label = [key for key in keys if key != "run.label"]
    return without_label or keys


def variants(experiments: Experiments, by: Sequence[str], unused: Unused = ()) -> dict[str, tuple[str, ...]]:
    """{run: its values of the `by` keys}: empty where its method has no such key, `default` where it was left out.

    unused: `Runs.unused_parts`
    """
    if not by:
        return dict.fromkeys(experiments, ())
    settings = {}
    with_key = set()  # (method, key) where a run of the method has the key
    for run, experiment in experiments.items():
        settings[run] = recorded_settings(experiment)
        method = experiment.method_name
        for key in by:
            if key in settings[run] and (method, _part_of(key)) not in unused:
                with_key.add((method, key))
    values = {}
    for run, experiment in experiments.items():
        texts = []
        for key in by:
            text = ""
            if (experiment.method_name, key) in with_key:
                text = value_text(settings[run].get(key, ABSENT))
            texts.append(text)
        values[run] = tuple(texts)
    return values


def variant_text(by: Sequence[str], values: Sequence[str], label: str = "") -> str:
    """Return `weight=0.25, lr=0.01`, without the settings that a label such as `fedig@terms.weight=0.25` has itself."""
    items = re.split("[@,]", label)
    texts = []
    for key, name, value in zip(by, short_names(by), values):
        is_in_label = any(f".{key}={value}".endswith(f".{item}") for item in items)
        if value and not is_in_label:
            texts.append(f"{name}={value}")
    return ", ".join(texts)


def short_names(keys: Sequence[str]) -> list[str]:
    """`method.proximal.mu` -> `mu`, unless another key ends alike."""
    last = [key.rpartition(".")[2] for key in keys]
    names = []
    for key, name in zip(keys, last):
        names.append(key if last.count(name) > 1 else name)
    return names
