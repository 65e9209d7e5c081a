"""Where weights come from: what a model file says in its metadata of the run that trained it, wherever the file goes.

The metadata of a model file are one entry, `fedsim`, whose text is JSON:

    {"round": 7, "origins": [{"target": "photo", "domains": {"art": {"images": 80, "content": "...", ...}, ...}}]}

An origin is one run: its unseen domain, and the fingerprints of its domains (fedsim.data.fingerprint). The first is the
run that wrote the file; others follow where it began with the model of another run. It is one entry because
safetensors writes several in any order, and equal models shall be equal bytes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError
from safetensors import safe_open

from fedsim.common.errors import UserError
from fedsim.common.files import of_home
from fedsim.common.values import JsonTable
from fedsim.data.client_data import domain_of
from fedsim.data.fingerprint import Fingerprints
from fedsim.methods.recipe import Recipe
from fedsim.parts.part import part_name
from fedsim.records.environment import read_environment
from fedsim.records.readers import named
from fedsim.records.reading import read_settings
from fedsim.settings.experiment import Experiment

ENTRY = "fedsim"  # of the metadata
IDENTITY = ("content", "nameless")  # the hashes of a fingerprint; equal ones are the same images
OWN_WEIGHTS = "_weights"  # the end of the names of those fields of parts that name a file


class Origin(BaseModel):
    """One run that trained a model: its unseen domain, and the fingerprints of its domains or clients."""

    target: str
    domains: dict[str, dict[str, str | int]] = {}


class ModelNote(BaseModel):
    """What the metadata of a model file say."""

    round: Annotated[int, Field(ge=0)]
    origins: list[Origin] = []


def metadata_of(number: int, origins: Sequence[Origin], **more: str) -> dict[str, str]:
    """Returns the metadata of a model file.

    number: the round of the model. more: further texts, such as its client
    """
    note = ModelNote(round=number, origins=list(origins))
    table: JsonTable = {**note.model_dump(), **more}
    return {ENTRY: json.dumps(table, sort_keys=True)}


def note_of(file: Path) -> ModelNote | None:
    """Returns what the metadata of a file of tensors say; None for a file that no run has written.

    Raises UserError for a file that is damaged, and for an entry that is not what a run writes.
    """
    with named(file, "the tensors"), safe_open(file, framework="numpy") as opened:
        metadata = opened.metadata() or {}
    try:
        if ENTRY in metadata:
            return ModelNote.model_validate_json(metadata[ENTRY])
        return ModelNote(round=metadata["round"]) if "round" in metadata else None
    except ValidationError:
        raise UserError(f"{file}: its metadata are not what a run writes; another program has changed it") from None


def round_of(file: Path) -> int:
    """Returns the round of the model in a file that a run has written; raises UserError for another file."""
    note = note_of(file)
    if note is None:
        raise UserError(f"{file} says no round; another program has written it")
    return note.round


def own_origin(experiment: Experiment, data: Fingerprints) -> Origin:
    """Returns the origin that this run writes. data: the fingerprints of its domains, or of its clients"""
    domains = {name: dict(table) for name, table in data.items()}
    return Origin(target=experiment.run.target, domains=domains)


def weight_files(experiment: Experiment, recipe: Recipe) -> Iterator[tuple[str, Path]]:
    """Yields (setting, file) of all files of weights with which a run begins, those of parts too."""
    settings = {"model.weights": experiment.model.weights}
    for _, part in recipe.pairs:
        for name in part.__dataclass_fields__:
            value = getattr(part, name)
            if name.endswith(OWN_WEIGHTS) and isinstance(value, str):
                settings[f"method.{part_name(part)}.{name}"] = value
    for setting, text in settings.items():
        file = of_home(text)
        if file.is_file():
            yield setting, file


def origins_of(file: Path) -> list[Origin]:
    """Returns the runs that trained the weights in a file: those of its metadata, otherwise that of its folder."""
    note = note_of(file) if file.suffix == ".safetensors" else None
    if note is not None and note.origins:
        return note.origins
    folder = file.parent
    if not (folder / "experiment.toml").is_file():
        return []
    data = read_environment(folder).get("data", {})
    return [own_origin(read_settings(folder), data)]


def earlier_origins(experiment: Experiment, recipe: Recipe) -> list[Origin]:
    """Returns the origins of all weights with which a run begins."""
    origins: list[Origin] = []
    for _, file in weight_files(experiment, recipe):
        origins += [origin for origin in origins_of(file) if origin not in origins]
    return origins


def refuse_seen(experiment: Experiment, recipe: Recipe, data: Fingerprints) -> None:
    """Raises UserError when weights with which a run begins were trained on its unseen domain, or selected by it.

    data: the fingerprints of the domains that this process can read. The images decide where both are known, under
    whatever name; otherwise the name does, because the sites of a deployment have their own images.
    """
    target = experiment.run.target
    for setting, file in weight_files(experiment, recipe):
        for origin in origins_of(file):
            name = seen_as(origin, target, data.get(target))
            if name:
                raise UserError(
                    f"{setting}: {file} is of a run that trained on {name!r}, which would be unseen here; take the "
                    f"model of a run whose unseen domain is {target!r}, or other weights"
                )


def seen_as(origin: Origin, target: str, unseen: Mapping[str, str | int] | None) -> str:
    """Returns the name under which a run trained on the unseen domain; empty when it did not.

    unseen: the fingerprint of the unseen domain; None where it is not known. Under another name only images without
    names and paths are compared: the contents of some data sets are hashes of what all of their domains are made of.
    """
    for name, fingerprint in origin.domains.items():
        domain = domain_of(name)
        if domain == origin.target:
            continue
        has_name = domain == target
        if unseen:
            hashes = IDENTITY if has_name else IDENTITY[-1:]
            is_same = any(key in fingerprint and fingerprint[key] == unseen.get(key) for key in hashes)
        else:
            is_same = has_name
        if is_same:
            return domain
    return ""
