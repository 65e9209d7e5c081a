"""What the runs of a comparison rest on besides their settings: images, recipe, threads, device, versions and revision.

Runs on different images under the same names, and different recipes under the same label, are not compared. The rest
can change the last digits of a sum, and after many steps the accuracy; a note below the table says what differs.
"""

from collections.abc import Hashable, Mapping
from typing import Any

from fedsim.common.errors import UserError
from fedsim.data import BENCHMARKS
from fedsim.data.findings import recorded_texts
from fedsim.data.fingerprint import came_and_went
from fedsim.data.shared_images import copy_texts
from fedsim.data.tensor_records import recorded_unit
from fedsim.records.differences import TESTED_KEYS, comparable_settings, differing_parts
from fedsim.records.doubt import DOUBTS, KEY
from fedsim.records.environment import PACKAGES, all_environments
from fedsim.records.reading import Runs, run_environment
from fedsim.settings.experiment import Experiment

NAMED_RUNS = 3  # of the rarer values of a note
NUMERIC_PACKAGES = ("torch", "torchvision", "timm", "numpy", "scipy", "scikit-learn", "pillow", "flwr", "fedsim")
Record = Mapping[str, Any]  # environment.json of a run, or a table in it
Environments = Mapping[str, Record]  # by run
First = dict[Hashable, tuple[str, Any]]  # of each group: the first run, and what it has


def environments(runs: Runs) -> dict[str, Record]:
    """The recorded environment of every finished run that has one."""
    environments: dict[str, Record] = {}
    for run in runs.summary["run"]:
        if environment := run_environment(runs, run):
            environments[run] = environment
    return environments


def unit_of(recorded: Environments) -> str:
    """Return what the examples of these runs are called, in the plural; `images` where nothing is recorded."""
    units = set(map(recorded_unit, recorded.values()))
    if not units:
        return "images"
    return units.pop() if len(units) == 1 else "examples"


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
    may have other ones for other seeds; runs on its data are compared with those of the same seed of splits. Rows with
    categories of the sources are encoded by these, so that runs are compared with those of the same unseen domain.
    """
    first: First = {}
    for run, table in recorded.items():
        experiment = runs.experiments[run]
        data = experiment.data
        drawn = "any" if data.dataset in BENCHMARKS else data.seed_of_splits
        of_sources = isinstance(data.columns.get("categories"), list)
        coded = experiment.run.target if of_sources else "any"
        group = (*_data_settings(experiment), drawn, coded)
        domains = {**table.get("data", {}), **table.get("server_data", {})}
        for name, images in domains.items():
            other, others = first.setdefault((group, name), (run, images))
            if others["content"] != images["content"]:
                raise UserError(
                    f"these runs have different {recorded_unit(table)} under the name {name!r} "
                    f"({others['images']:,} in {other}, {images['images']:,} in {run}); "
                    "compare the runs of each data set by themselves"
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
    first: First = {}
    for run, table in recorded.items():
        experiment = runs.experiments[run]
        row = BENCHMARKS.get(experiment.data.dataset)
        has_fixed_domains = row is not None and bool(row.domains)
        domains = table.get("data")
        if has_fixed_domains or not domains or experiment.run.runtime == "deployment":
            continue
        group = tuple(_data_settings(experiment))
        other, seen = first.setdefault(group, (run, domains))
        if differs := came_and_went(seen, domains):
            raise UserError(
                f"{run} did not have the domains of {other} ({differs}); compare the runs of each data set by "
                "themselves"
            )


def refuse_unlike_recipes(recorded: Environments, labels: Mapping[str, str]) -> None:
    """UserError when runs of one row of the table had different recipes, because a default changed between versions."""
    first: First = {}
    for run, table in recorded.items():
        if recipe := table.get("recipe"):
            label = labels[run]
            other, seen = first.setdefault(label, (run, recipe))
            if differs := differing_parts(seen, recipe):
                raise UserError(
                    f"{label} was not the same recipe in {other} and {run}: {', '.join(differs[:5])}; "
                    "they were made by different versions of fedsim, compare them apart"
                )


def refuse_unlike_frozen(runs: Runs, recorded: Environments, labels: Mapping[str, str]) -> None:
    """UserError when runs of one row with one seed rest on other frozen weights: another file stood behind one name.

    Weights that a seed draws (`model.weights = "none"`) change with the version of PyTorch only, which a note names.
    """
    first: First = {}
    for run, table in recorded.items():
        experiment = runs.experiments[run]
        weights = experiment.model.weights
        frozen = table.get("frozen")
        if frozen and weights != "none":
            group = labels[run], experiment.run.seed
            other, seen = first.setdefault(group, (run, frozen))
            if seen != frozen:
                raise UserError(
                    f"{labels[run]} had other frozen weights in {other} than in {run}, although model.weights is "
                    f"{weights!r} in both; compare them apart"
                )


def refuse_unlike_files(runs: Runs, recorded: Environments) -> None:
    """UserError when runs began with different files under one name in `model.weights`."""
    first: First = {}
    for run, table in recorded.items():
        weights = runs.experiments[run].model.weights
        if content := table.get("weights"):
            other, seen = first.setdefault(weights, (run, content))
            if seen != content:
                raise UserError(
                    f"model.weights is {weights!r} in {other} and in {run}, but the file was another one; compare the "
                    "runs of each file by themselves"
                )


def provenance_notes(recorded: Environments) -> list[str]:
    """Notes on images that were not unseen, and on everything that differs between the environments of the runs."""
    notes = shared_notes(recorded)
    notes += finding_notes(recorded)
    notes += privacy_notes(recorded)
    notes += site_notes(recorded)
    notes += app_notes(recorded)
    values: dict[str, dict[str, Any]] = {}  # {what is recorded: {run, or part of its rounds: its value}}
    for run, table in recorded.items():
        for part, environment in all_environments(table):
            for what, value in _facts(environment).items():
                by_run = values.setdefault(what, {})
                if value:
                    by_run[run + part] = value
    differences = []
    for what, by_run in values.items():
        if text := _different(what, by_run):
            differences.append(text)
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
        sources = shared.get("sources")
        if isinstance(sources, Mapping):
            places = []
            for domain, copies_there in sources.items():
                places.append(f"{domain} {copies_there}")
            where = ", ".join(places)
            count = shared.get("shared")
            images = shared.get("images")
            target = shared.get("target")
            unit = shared.get("unit", "images")
            same = "files" if unit == "images" else "values"
            share = f"{count} of {images} {unit} of {target}"
            seen[f"{share} (in {where})"] = None
    notes = []
    if seen:
        notes.append(f"Not unseen, because domains that train or select have the same {same}: {'; '.join(seen)}.")
    if copies:
        notes.append(f"Copies: {'; '.join(copies)}.")
    return notes


def finding_notes(recorded: Environments) -> list[str]:
    """A note on what the runs have found in their data, each finding once."""
    texts: dict[str, None] = {}
    for table in recorded.values():
        texts |= dict.fromkeys(recorded_texts(table.get("findings", [])))
    return [f"Found in the data: {'; '.join(texts)}."] if texts else []


def privacy_notes(recorded: Environments) -> list[str]:
    """A note on the guarantee of runs with differential privacy, and on what it does not cover."""
    guarantees: dict[str, list[str]] = {}  # {text: its runs}
    for run, table in recorded.items():
        text = str(table.get("privacy", ""))
        if text:
            runs_with_it = guarantees.setdefault(text, [])
            runs_with_it.append(run)
    notes = []
    for text, runs in guarantees.items():
        notes.append(f"{_named(runs)}: {text}.")
    return notes


def doubt_notes(recorded: Environments, metric: str) -> list[str]:
    """Return a note on runs that fitted their doubt without some of their sources, for a metric that rests on it."""
    if metric not in DOUBTS:
        return []
    named = []
    for run, table in recorded.items():
        doubt = table.get(KEY) or {}
        missing = doubt.get("missing")
        if missing:
            names = ", ".join(missing)
            named.append(f"{run} ({names})")
    if not named:
        return []
    runs = ", ".join(named)
    return [f"The sets and the temperature are fitted without some of the sources in {runs}."]


def site_notes(recorded: Environments) -> list[str]:
    """A note on each run of separate machines in which sites had other versions of packages than the server."""
    notes = []
    for run, table in recorded.items():
        server = dict(table.get("packages", {}))
        server["python"] = table.get("python")
        differing = []
        for site, packages in table.get("sites", {}).items():
            for name, version in packages.items():
                here = server.get(name, version)
                if here != version:
                    text = f"{name} {version} at {site}, {here} on the server"
                    differing.append(text)
        if differing:
            texts = "; ".join(differing)
            notes.append(f"{run}: sites had other versions than the server: {texts}.")
    return notes


def app_notes(recorded: Environments) -> list[str]:
    """A note on runs whose clients had an app's own code, of which the records know the configs alone."""
    runs = [run for run, table in recorded.items() if "app" in table]
    if not runs:
        return []
    return [
        f"{_named(runs)}: the clients trained by an app's own code, whose learning rate, batches, network and data are "
        "in no record, so that nothing compared them."
    ]


def _named(runs: list[str]) -> str:
    if len(runs) > NAMED_RUNS:
        return f"{len(runs)} runs"
    return ", ".join(runs)


def _facts(table: Record) -> dict[str, Any]:
    """What an environment has recorded, by what it is in words."""
    packages = table.get("packages", {})
    commit = table.get("git_commit", "")[:7]
    if table.get("git_dirty"):
        commit += " with changes"
    facts = {
        "threads": table.get("threads"),
        "device": table.get("device"),
        "machine type": table.get("machine"),
        "Python": table.get("python"),
        "revision of fedsim": commit,
    }
    for name in NUMERIC_PACKAGES:
        facts[name] = packages.get(name)
    for name, version in packages.items():
        if name not in (*PACKAGES, "fedsim"):  # from outside
            facts[name] = version
    sites = table.get("sites", {})
    for site, versions in sites.items():
        for name, version in versions.items():
            what = f"{name} at {site}"
            facts[what] = version
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
    texts = []
    for value in sorted(groups, key=lambda value: -len(groups[value])):
        runs = groups[value]
        texts.append(f"{value} ({_named(runs)})")
    return f"{what} {', '.join(texts)}"
