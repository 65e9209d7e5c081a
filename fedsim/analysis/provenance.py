"""What the runs of a comparison rest on beside their settings: images, recipe, threads, device, versions and revision.

Runs on different images under the same names, and different recipes under the same label, are not compared. The rest
can change the last digits of a sum, and after many steps the accuracy; a note below the table says what differs.
"""

from collections.abc import Mapping
from typing import Any

from fedsim.common.errors import UserError
from fedsim.data import BENCHMARKS
from fedsim.data.fingerprint import came_and_went
from fedsim.data.shared_images import copy_texts
from fedsim.records.differences import TESTED_KEYS, comparable_settings, differing_parts
from fedsim.records.environment import PACKAGES, all_environments
from fedsim.records.reading import Runs, run_environment
from fedsim.settings.experiment import Experiment

NAMED_RUNS = 3  # of the rarer values of a note
NUMERIC_PACKAGES = ("torch", "torchvision", "timm", "numpy", "scipy", "scikit-learn", "pillow", "flwr", "fedsim")
Environments = Mapping[str, Mapping[str, Any]]  # environment.json by run


def environments(runs: Runs) -> dict[str, dict[str, Any]]:
    """The recorded environment of every finished run that has one."""
    environments = {run: run_environment(runs, run) for run in runs.summary["run"]}
    return {run: environment for run, environment in environments.items() if environment}


def refuse_unlike(runs: Runs, recorded: Environments, labels: Mapping[str, str]) -> None:
    """UserError when runs differ in images or weights under one name, or those of one label ({run: label}) in their
    recipe."""
    refuse_unlike_data(runs, recorded)
    refuse_unlike_domains(runs, recorded)
    refuse_unlike_recipes(recorded, labels)
    refuse_unlike_files(runs, recorded)
    refuse_unlike_frozen(runs, recorded, labels)


def refuse_unlike_data(runs: Runs, recorded: Environments) -> None:
    """UserError when runs with the same data settings used different images under one name, with any seeds.

    Fingerprints are of all images of a domain, before a seed draws some of them. Only a reader from outside of fedsim
    may have other ones for other seeds; runs on its data are compared with those of the same seed of splits.
    """
    first: dict[tuple, tuple[str, Mapping[str, Any]]] = {}
    for run, table in recorded.items():
        experiment = runs.experiments[run]
        drawn = "any" if experiment.data.dataset in BENCHMARKS else experiment.data.seed_of_splits
        group = (*_data_settings(experiment), drawn)
        domains = {**table.get("data", {}), **table.get("server_data", {})}
        for name, images in domains.items():
            other, others = first.setdefault((group, name), (run, images))
            if others["content"] != images["content"]:
                raise UserError(
                    f"these runs have different images under the name {name!r} ({others['images']:,} in {other}, "
                    f"{images['images']:,} in {run}); compare the runs of each data set by themselves"
                )


def _data_settings(experiment: Experiment) -> list[tuple[str, str]]:
    """The settings that say which images belong to which domain."""
    drawing = ("data.split_seed", *TESTED_KEYS)
    settings = []
    for key, value in comparable_settings(experiment).items():
        if key.startswith("data.") and key not in drawing:
            settings.append((key, str(value)))
    return sorted(settings)


def refuse_unlike_domains(runs: Runs, recorded: Environments) -> None:
    """UserError when runs with the same data settings found other domains, because folders came to the data root or
    went. The domains of a benchmark are always the same, and those of a deployment are its sites."""
    first: dict[tuple, tuple[str, Mapping[str, Any]]] = {}
    for run, table in recorded.items():
        experiment = runs.experiments[run]
        row = BENCHMARKS.get(experiment.data.dataset)
        if (row and row.domains) or not table.get("data") or experiment.run.runtime == "deployment":
            continue
        other, seen = first.setdefault(tuple(_data_settings(experiment)), (run, table["data"]))
        if differs := came_and_went(seen, table["data"]):
            raise UserError(
                f"{run} did not have the domains of {other} ({differs}); compare the runs of each data set by "
                "themselves"
            )


def refuse_unlike_recipes(recorded: Environments, labels: Mapping[str, str]) -> None:
    """UserError when runs of one row of the table had different recipes, because a default changed between versions."""
    first: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for run, table in recorded.items():
        if "recipe" in table:
            other, seen = first.setdefault(labels[run], (run, table["recipe"]))
            if differs := differing_parts(seen, table["recipe"]):
                raise UserError(
                    f"{labels[run]} was not the same recipe in {other} and {run}: {', '.join(differs[:5])}; "
                    "they were made by different versions of fedsim, compare them apart"
                )


def refuse_unlike_frozen(runs: Runs, recorded: Environments, labels: Mapping[str, str]) -> None:
    """UserError when runs of one row with one seed rest on other frozen weights: another file stood behind one name.

    Weights that a seed draws (`model.weights = "none"`) change with the version of PyTorch only, which a note names.
    """
    first: dict[tuple[str, int], tuple[str, str]] = {}
    for run, table in recorded.items():
        experiment = runs.experiments[run]
        if "frozen" in table and experiment.model.weights != "none":
            other, seen = first.setdefault((labels[run], experiment.run.seed), (run, table["frozen"]))
            if seen != table["frozen"]:
                raise UserError(
                    f"{labels[run]} had other frozen weights in {other} than in {run}, although model.weights is "
                    f"{experiment.model.weights!r} in both; compare them apart"
                )


def refuse_unlike_files(runs: Runs, recorded: Environments) -> None:
    """UserError when runs began with different files under one name in `model.weights`."""
    first: dict[str, tuple[str, str]] = {}
    for run, table in recorded.items():
        weights = runs.experiments[run].model.weights
        if "weights" in table:
            other, seen = first.setdefault(weights, (run, table["weights"]))
            if seen != table["weights"]:
                raise UserError(
                    f"model.weights is {weights!r} in {other} and in {run}, but the file was another one; compare the "
                    "runs of each file by themselves"
                )


def provenance_notes(recorded: Environments) -> list[str]:
    """Notes on images that were not unseen, and on everything that differs between the environments of the runs."""
    notes = shared_notes(recorded) + privacy_notes(recorded)
    values: dict[str, dict[str, Any]] = {}  # {what is recorded: {run, or part of its rounds: its value}}
    for run, table in recorded.items():
        for part, environment in all_environments(table):
            for what, value in _facts(environment).items():
                by_run = values.setdefault(what, {})
                if value:
                    by_run[run + part] = value
    differences = [_different(what, by_run) for what, by_run in values.items()]
    differences = [text for text in differences if text]
    if not differences:
        return notes
    return [*notes, f"Not the same for all runs: {'; '.join(differences)}. Results can differ for this reason alone."]


def shared_notes(recorded: Environments) -> list[str]:
    """Notes on images that are there twice: in unseen domains, in two source domains, in training and validation."""
    same = "files"
    seen: dict[str, None] = {}  # texts, each once
    copies: dict[str, None] = {}
    for table in recorded.values():
        shared = table.get("shared_images")
        if not isinstance(shared, Mapping):
            continue
        copies |= dict.fromkeys(copy_texts(shared))
        if isinstance(shared.get("sources"), Mapping):
            where = ", ".join(f"{domain} {count}" for domain, count in shared["sources"].items())
            unit = shared.get("unit", "images")
            same = "files" if unit == "images" else "values"
            text = f"{shared.get('shared')} of {shared.get('images')} {unit} of {shared.get('target')} (in {where})"
            seen[text] = None
    notes = []
    if seen:
        notes.append(f"Not unseen, because domains that train or select have the same {same}: {'; '.join(seen)}.")
    if copies:
        notes.append(f"Copies: {'; '.join(copies)}.")
    return notes


def privacy_notes(recorded: Environments) -> list[str]:
    """A note on the guarantee of runs with differential privacy, and on what it does not cover."""
    guarantees: dict[str, list[str]] = {}  # {text: its runs}
    for run, table in recorded.items():
        guarantees.setdefault(str(table.get("privacy", "")), []).append(run)
    return [f"{_named(runs)}: {text}." for text, runs in guarantees.items() if text]


def _named(runs: list[str]) -> str:
    return ", ".join(runs) if len(runs) <= NAMED_RUNS else f"{len(runs)} runs"


def _facts(table: Mapping[str, Any]) -> dict[str, Any]:
    """What an environment has recorded, by what it is in words."""
    packages = table.get("packages", {})
    commit = table.get("git_commit", "")[:7]
    facts = {
        "threads": table.get("threads"),
        "device": table.get("device"),
        "machine type": table.get("machine"),
        "Python": table.get("python"),
        "revision of fedsim": f"{commit} with changes" if table.get("git_dirty") else commit,
    }
    for name in NUMERIC_PACKAGES:
        facts[name] = packages.get(name)
    for name, version in packages.items():
        if name not in (*PACKAGES, "fedsim"):  # from outside
            facts[name] = version
    for domain, images in table.get("data", {}).items():
        if "environment" in images:
            facts[f"number of {domain} among all domains, which seeds its split,"] = str(images["environment"])
    return facts


def _different(what: str, values: Mapping[str, Any]) -> str:
    """`threads 1 (6 runs), 2 (csac/photo/seed0)`; empty when all runs that recorded it have one value."""
    groups: dict[Any, list[str]] = {}  # a run that was resumed elsewhere has a value for each part of its rounds
    for run, value in values.items():
        groups.setdefault(value, []).append(run)
    if len(groups) < 2:
        return ""
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    texts = [f"{value} ({_named(runs)})" for value, runs in ordered]
    return f"{what} {', '.join(texts)}"
