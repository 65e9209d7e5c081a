"""Refuses to go on in a folder that holds a run with other settings or code, on other data or from other weights."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fedsim.common.errors import UserError
from fedsim.common.files import of_home
from fedsim.data.fingerprint import Fingerprints, came_and_went, difference, fingerprint, fingerprints
from fedsim.methods.recipe import Recipe, values_of
from fedsim.methods.registry import packages_of
from fedsim.methods.variants import same_method
from fedsim.records.differences import ATTACKERS, LIMITS, NUMBERLESS_KEYS, RUN_KEYS, differing_parts
from fedsim.records.environment import read_environment
from fedsim.records.reading import read_settings
from fedsim.records.record_files import is_finished
from fedsim.runs.frozen import WEIGHTS_KEY, weights_record
from fedsim.runs.longer import ROUNDS, refuse_to_go_on
from fedsim.settings.experiment import Experiment
from fedsim.settings.plugins import HASH, outside_versions
from fedsim.settings.run import NO_TARGET

NUMBERS = (*RUN_KEYS, ATTACKERS, "run.threads")  # settings of [run] that no call of a run may change
# Those that add something to a run's records and change no number of the others.
RECORDS = (
    "run.keep_predictions", "run.keep_personal", "run.keep_state", "run.personalised", "run.record",
    "run.client_rows", "run.tensorboard",
)  # fmt: skip

ELSEWHERE = "choose another --output or name, or remove the folder"


def local_fingerprints(experiment: Experiment) -> Fingerprints:
    """Returns the fingerprints of the data that this process can read.

    There are none in a deployment, whose images are on its sites.
    """
    return {} if experiment.run.runtime == "deployment" else fingerprints(experiment.data)


def server_fingerprints(experiment: Experiment, recipe: Recipe) -> Fingerprints:
    """Returns the fingerprints of the images that parts of the recipe use on the server, which belong to no domain."""
    by_name: Fingerprints = {}
    for _, part in recipe.pairs:
        by_name |= part.server_data(experiment)
    return by_name


def data_here(experiment: Experiment, recipe: Recipe) -> tuple[Fingerprints, Fingerprints]:
    """Returns the fingerprints (of the data that this process can read, of the images that parts use on the server)."""
    return local_fingerprints(experiment), server_fingerprints(experiment, recipe)


def data_of_server(experiment: Experiment, recipe: Recipe) -> tuple[Fingerprints, Fingerprints]:
    """Returns the same on the machine of a server, which in a deployment may have the unseen domain."""
    data, server_data = data_here(experiment, recipe)
    run = experiment.run
    if run.runtime == "deployment" and run.evaluate_target != "site" and run.target != NO_TARGET:
        data = {run.target: fingerprint(experiment.data, run.target)}
    return data, server_data


DataOf = Callable[[Experiment, Recipe], tuple[Fingerprints, Fingerprints]]


def refuse_other_data(folder: Path, then: Fingerprints, now: Fingerprints) -> None:
    """Raises UserError when the run in a folder used other data than the present data."""
    _refuse(folder, difference(then, now))


def _refuse(folder: Path, differs: str) -> None:
    """Raises the UserError for other data, if they differ."""
    if differs:
        raise UserError(f"{folder} holds a run on other data ({differs}); {ELSEWHERE}")


def refuse_other_settings(folder: Path, experiment: Experiment, recipe: Recipe, data_of: DataOf = data_here) -> None:
    """Raises UserError when the folder holds a run with other settings, code, data or initial weights.

    A run of fewer rounds is no other run where it can go on. An interrupted run may go on with other limits: its
    records then say from which round.
    """
    if not (folder / "experiment.toml").is_file():
        return
    then = read_settings(folder)
    changed = changed_settings(then, experiment)
    if not is_finished(folder):
        changed = [key for key in changed if key not in LIMITS]
    if changed == [ROUNDS]:
        refuse_to_go_on(folder, then, experiment, recipe)
    elif changed:
        raise UserError(f"{folder} holds a run with other settings ({', '.join(changed[:5])}); {ELSEWHERE}")
    recorded = read_environment(folder)
    parts = differing_parts(recorded.get("recipe", {}), values_of(recipe))
    if parts:
        raise UserError(
            f"{folder} holds a run of another recipe, by another version of fedsim: {', '.join(parts[:5])}; {ELSEWHERE}"
        )
    refuse_other_code(folder, recorded, experiment)
    weights = weights_record(experiment.model.weights).get(WEIGHTS_KEY)
    if weights and recorded.get(WEIGHTS_KEY) != weights:
        raise UserError(
            f"{folder} holds a run that began with another file {experiment.model.weights!r} (model.weights); put that "
            f"back, {ELSEWHERE}"
        )
    used = recorded.get("data", {}) | recorded.get("server_data", {})
    if used:
        data, server_data = data_of(experiment, recipe)
        refuse_other_data(folder, used, data | server_data)
        if recorded.get("data") and "deployment" not in (then.run.runtime, experiment.run.runtime):
            _refuse(folder, came_and_went(recorded["data"], data))


def refuse_other_code(folder: Path, recorded: Mapping[str, Any], experiment: Experiment) -> None:
    """Raises UserError when a module from outside has another hash than the one that a finished run has recorded.

    An interrupted run may go on with other code: its records then say from which round.
    """
    then, now = recorded.get("packages", {}), outside_versions(packages_of(experiment))
    modules = [name for name, version in now.items() if then.get(name, "").startswith(HASH) and then[name] != version]
    if modules and is_finished(folder):
        raise UserError(
            f"{folder} holds a run with other code ({', '.join(modules)} has changed since); put that back, {ELSEWHERE}"
        )


def changed_settings(then: Experiment, now: Experiment) -> list[str]:
    """Returns the settings that differ between a recorded experiment and the one asked for, and change its numbers."""
    changed = differing_keys(then.model_dump(), now.model_dump())
    if of_home(then.model.weights).resolve() == of_home(now.model.weights).resolve():
        # The runtime flower names the file by its whole path.
        changed = [key for key in changed if key != "model.weights"]
    if same_method(then, now):  # asked for in other words
        changed = [key for key in changed if not key.startswith("method.")]
    return [key for key in changed if key not in NUMBERLESS_KEYS and _changes_numbers(key)]


def _changes_numbers(key: str) -> bool:
    """Whether numbers depend on a setting, of which those of [run] are few."""
    return not key.startswith("run.") or key in NUMBERS or key.startswith(f"{ATTACKERS}.")


def too_late(finished: Iterable[tuple[Path, Experiment]]) -> str:
    """Returns what to say when finished runs lack records that their experiments ask for; mostly an empty text.

    finished: (folder, the experiment that is asked for) of each run
    """
    lacking: dict[Path, list[str]] = {}
    for folder, asked in finished:
        changed = differing_keys(read_settings(folder).model_dump(), asked.model_dump())
        late = [key for key in RECORDS if key in changed]
        if late:
            lacking[folder] = late
    if not lacking:
        return ""
    keys = dict.fromkeys(key for late in lacking.values() for key in late)
    first = next(iter(lacking))
    folders = f"the folder {first}"
    if len(lacking) > 1:
        folders = f"{len(lacking)} folders, of which {first} is the first"
    return f"{', '.join(keys)} changed too late for what it records; choose another --output, or remove {folders}"


def differing_keys(a: object, b: object, prefix: str = "") -> list[str]:
    """Returns the dotted names of the values in which two settings tables differ."""
    if not isinstance(a, dict) or not isinstance(b, dict):
        return [] if a == b else [prefix]
    names: list[str] = []
    for key in sorted(a.keys() | b.keys()):
        name = f"{prefix}.{key}" if prefix else key
        names += differing_keys(a.get(key), b.get(key), name)
    return names
