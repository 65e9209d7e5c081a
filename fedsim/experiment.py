"""Settings: one TOML file is one experiment. The only place that parses settings.

    experiment = read_experiment("configs/pacs.toml", overrides=["train.rounds=5", "method.guiding_head.weight=0.25"])

Order of precedence: the file, then its preset (`preset = "csac"` picks `[presets.csac]`), then the overrides.
"""

import hashlib
import json
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from fedsim.errors import UserError, nearest
from fedsim.plugins import entry_points

# Rows of fedsim.data.augment.
AUGMENTS = ("none", "domainbed", "csac", "feddg-ga", "flip-jitter", "fedsb", "ccst", "flip")

LONGEST_NAME = 200  # bytes of a part of a folder's name; file systems take 255 for the whole


class Settings(BaseModel):
    """Base of all sections: unknown keys are errors, values are checked, instances are immutable.

    Strict: neither true nor "5" is a number, and 1 is no boolean.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers_are_names(cls, table: Any) -> Any:
        """A domain may be called 100: a whole number where a text is wanted is that text."""
        if not isinstance(table, dict):
            return table
        wanted = {key: field.annotation for key, field in cls.model_fields.items() if key in table}
        return {**table, **{key: _as_text(table[key], kind) for key, kind in wanted.items()}}


def _as_text(value: Any, kind: Any) -> Any:
    """A whole number as the text that is wanted, alone or in a list; anything else as it is."""
    if kind == list[str] and isinstance(value, list):
        return [_as_text(item, str) for item in value]
    return str(value) if kind is str and type(value) is int else value


def folder_name(value: str) -> str:
    """A text that can name one folder, and only one below its parent; ValueError says what is wrong with it."""
    if value in (".", "..") or any(sign in value for sign in "/\\") or not value.isprintable():
        raise ValueError("it names a folder: no slashes, no control characters, and neither . nor ..")
    if len(value.encode(errors="surrogateescape")) > LONGEST_NAME:
        raise ValueError(f"it names a folder: at most {LONGEST_NAME} bytes")
    return value


class DataSettings(Settings):
    """[data]: which images, how they are split, how batches are augmented."""

    dataset: str = Field(
        "digits", description="digits, rotated-mnist, pacs, vlcs, office-home, terra-incognita, folder"
    )
    root: str = Field("", description="folder of the data set; empty: $FEDSIM_DATA, else ./data")
    domains: list[str] = Field([], description="use only these domains; empty: all of the data set")
    classes: list[str] = Field(
        [],
        description="a `folder` data set's classes, where its images are on other machines (a deployment's server), "
        "or where a domain may lack some of them",
    )
    image_size: int = Field(28, ge=8, le=1024, description="images are decoded once to this size, in pixels")
    columns: dict[str, str] = Field(
        {}, description="names of a table's columns where they are not path, label, domain and split"
    )
    variant: Literal["csac", "domainbed"] = Field(
        "csac", description="Rotated MNIST: same images in every domain, or disjoint"
    )
    fraction: float = Field(
        1.0, gt=0, le=1, description="share of every domain's images used (per class, by split_seed)"
    )
    holdout: float = Field(0.1, gt=0, lt=1, description="share of a client's images held out for validation")
    split: Literal["random", "stratified", "lists"] = Field(
        "random", description="DomainBed's split, per class (CSAC), or the published lists in data.lists"
    )
    lists: str = Field("", description="folder of split lists, seen from data.root: DOMAIN_train*.txt and so on")
    split_seed: int = Field(
        -1, ge=-1, description="seed of subsets, splits and partitions; -1: run.seed, so that seeds differ in data too"
    )
    test_split: Literal["all", "in", "list"] = Field(
        "all",
        description="target images tested: all, DomainBed's 'in' part, or those of DOMAIN_test*.txt in data.lists",
    )
    clients_per_domain: int = Field(1, ge=1, description="clients that share one domain")
    partition: Literal["iid", "dirichlet"] = Field("iid", description="how a domain is shared between its clients")
    alpha: float = Field(0.5, gt=0, description="concentration of the Dirichlet partition over classes")
    augment: str = Field(
        "none",
        description=f"{', '.join(AUGMENTS)}, or module:name of your own",
    )
    normalize: Literal["none", "imagenet", "mnist", "weights"] = Field(
        "none", description="mean and std after augmentation; weights: those that go with the backbone's weights"
    )
    cache: str = Field("", description="folder of the decoded images; empty: $FEDSIM_CACHE, else ~/.cache/fedsim")
    _run_seed: int = PrivateAttr(0)  # set by the Experiment

    @property
    def seed_of_splits(self) -> int:
        """The seed that splits are drawn from: `split_seed`, or the run's."""
        return self._run_seed if self.split_seed < 0 else self.split_seed

    @field_validator("augment")
    @classmethod
    def _augmentation_is_known(cls, name: str) -> str:
        known = [*AUGMENTS, *entry_points("augmentations")]
        if name not in known and ":" not in name:
            raise ValueError(f"no augmentation {name!r}; {nearest(name, known)}known: {', '.join(known)}")
        return name


class ModelSettings(Settings):
    """[model]: backbone, its initial weights and an optional bottleneck before the linear head."""

    backbone: str = Field(
        "digits-cnn-bn",
        description="digits-cnn, digits-cnn-bn, resnet18, resnet50, densenet121, alexnet, vit-b-16, vit-b-32, "
        "or timm:NAME for a model of timm",
    )
    options: dict[str, Any] = Field({}, description="further arguments of timm.create_model")
    weights: str = Field(
        "none",
        description="none (random), imagenet or hub (downloaded), package (a Python package's), or a local file",
    )
    train: str = Field(
        "all",
        description="all; or what is trained while the rest stays frozen and does not travel: head, norm, or a pattern "
        "of parameter names such as backbone.layer4.*, joined by +",
    )
    bottleneck: int = Field(0, ge=0, description="width of Linear-BatchNorm1d-ReLU before the head; 0: none")


class TrainSettings(Settings):
    """[train]: rounds, local work and its optimizer."""

    rounds: int = Field(10, ge=1)
    epochs: int = Field(1, ge=1, description="local passes per round, unless iterations is set")
    iterations: int = Field(0, ge=0, description="local steps per round; 0: epochs count")
    batch_size: int = Field(64, ge=2)
    budget: Literal["paper", "images", "steps"] = Field(
        "paper",
        description="local work: as the method's parts say, or as many training images (steps) as FedAvg's, preludes "
        "and copies included (clients/budget.py)",
    )
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = Field(0.01, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    schedule: Literal["constant", "cosine", "cosine-official", "step"] = Field(
        "constant",
        description="over rounds: cosine at (t-1)/T; cosine-official at t/T (gPerXAN's code); "
        "step: x0.1 from 80 % of the rounds on",
    )
    persist_optimizer: bool = Field(False, description="keep momentum and Adam moments between rounds")
    clients_per_round: int = Field(0, ge=0, description="clients drawn each round; 0: all")
    evaluate_clients: str = Field(
        "all",
        pattern="^(all|drawn|[1-9][0-9]*)$",
        description="clients that validate a round's model, on which selection rests: all, drawn (those that trained "
        "in the round), or a number, so many that stay the same",
    )
    evaluate_every: int = Field(1, ge=1, description="rounds between validations; the last round is always validated")
    precision: Literal["fp32", "bf16"] = "fp32"
    dp_clip: float = Field(
        0.0, ge=0, description="local differential privacy: largest L2 norm of a client's update, 0: off"
    )
    dp_epsilon: float = Field(1.0, gt=0, description="its epsilon in each round; above 1 without a guarantee")
    dp_delta: float = Field(1e-5, gt=0, lt=1, description="its delta in each round")
    local_checks: int = Field(
        0, ge=0, description="validations during local training, the best iterate is sent; 0: off"
    )


class RunSettings(Settings):
    """[run]: what is held out, where it runs, what happens when a client fails."""

    target: str = Field("", description="the unseen domain; empty: the last one")
    seed: int = Field(0, ge=0)
    label: Annotated[str, AfterValidator(folder_name)] = Field(
        "", description="told apart from other runs of the same method, e.g. by a sweep's grid"
    )
    runtime: Literal["inline", "ray", "flower", "deployment"] = Field(
        "inline",
        description="this process, Ray workers, Flower's own simulation engine, or a federation's own machines",
    )
    federation: str = Field("", description="the deployment's federation file")
    evaluate_target: Literal["auto", "server", "site"] = Field(
        "auto",
        description="who holds the unseen domain's images: the server, or a site with role = target; "
        "auto: the site when the federation file has one, else the server",
    )
    wait_for_sites: float = Field(300.0, gt=0, description="seconds to wait for sites that are not online")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(
        1,
        ge=0,
        description="CPU threads of each process that computes; numbers depend on it: it is recorded and compared; "
        "0: as many as cores are free to the process (a deployment's sites: each its own)",
    )
    output: str = "outputs"
    keep_predictions: bool = Field(
        True, description="keep the target's predictions of the selected, last and oracle round, for `compare --metric`"
    )
    evaluate_batch_size: int = Field(256, ge=1)
    checkpoint_every: int = Field(1, ge=1, description="rounds between checkpoints")
    select_on: Literal["aggregated", "local"] = Field(
        "aggregated",
        description="whose validation accuracy selects the round: the aggregated model's, or the local models' mean",
    )
    personalised: bool = Field(
        False, description="source clients also validate with their own batch norm (clients.csv)"
    )
    keep_personal: bool = Field(
        False, description="write every client's own model to personal-<client>.safetensors; sites keep theirs"
    )
    on_client_failure: Literal["stop", "continue"] = "stop"
    patience: float = Field(
        600.0,
        ge=0,
        description="seconds for which a site whose connection broke is waited for, and asked again, before its reply "
        "counts as lost",
    )
    update_limit: float = Field(
        100.0,
        ge=0,
        description="a reply that moves the model more than so many times as far as the median of the others is "
        "refused; 0: any",
    )
    examples_limit: float = Field(
        100.0,
        ge=0,
        description="a site that says it holds more than so many times the examples of the others' median is "
        "refused; 0: any number is believed",
    )
    timeout: float = Field(3600.0, gt=0, description="seconds to wait for the replies of one phase")
    ray_address: str = Field("", description="existing Ray cluster; empty: a local one is started")
    workers: int = Field(0, ge=0, description="Ray workers; 0: as many as the resources carry, at most one per client")
    cpus_per_worker: float = Field(1.0, gt=0)
    gpus_per_worker: float = Field(0.0, ge=0, description="fraction of a GPU; 0: Ray workers share what GPUs there are")
    tensorboard: bool = Field(False, description="also write TensorBoard scalars into the run's folder")
    callbacks: list[str] = Field([], description="trackers of your own, package.module:Class (see RunCallback)")


class Experiment(Settings):
    """One experiment, resolved: everything that a run depends on."""

    name: Annotated[str, AfterValidator(folder_name), Field(min_length=1)] = "experiment"
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    train: TrainSettings = TrainSettings()
    method: dict[str, Any] = {"name": "fedavg"}
    parts: dict[str, dict[str, Any]] = Field(
        {}, description="fields of parts on this data set, for recipes that have them"
    )
    run: RunSettings = RunSettings()

    @model_validator(mode="after")
    def _method_has_name(self) -> "Experiment":
        if not isinstance(self.method.get("name"), str) or not self.method["name"]:
            raise ValueError("method.name is missing: give the name of a method (see `fedsim methods`)")
        return self

    @model_validator(mode="after")
    def _data_knows_the_seed(self) -> "Experiment":
        data = self.data.model_copy()
        data._run_seed = self.run.seed
        object.__setattr__(self, "data", data)  # a copy, so that no other experiment's settings change
        return self

    @property
    def method_name(self) -> str:
        """Name of the METHODS row (or `a+b` for a combination)."""
        return self.method["name"]

    def toml(self) -> str:
        """The resolved settings as TOML text; `parse_experiment` reads it back unchanged."""
        return tomli_w.dumps(self.model_dump())

    def replace(self, **sections: dict[str, Any]) -> "Experiment":
        """A validated copy with single settings changed: `replace(run={"seed": 1})`."""
        return from_table(_merge(self.model_dump(), sections))

    def settings_hash(self) -> str:
        """Short hash of all that a run's numbers depend on, except method, target and seed."""
        table = self.model_dump()
        del table["method"], table["name"]
        table["run"] = {key: table["run"][key] for key in ("select_on", "on_client_failure")}
        for key in ("root", "cache"):
            del table["data"][key]
        return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:10]


SECTIONS = {"data": DataSettings, "model": ModelSettings, "train": TrainSettings, "run": RunSettings}


def config_folders() -> list[Path]:
    """Folders searched for configs by name: the source tree's (and FAB's), then the installed package's."""
    package = Path(__file__).parent
    return [package.parent / "configs", package / "_configs"]


def find_config(config: str) -> Path:
    """Path of a config given as a path or by name (`pacs`, `configs/pacs.toml`)."""
    path = Path(config)
    if path.is_file():
        return path
    name = path.name if path.suffix == ".toml" else path.name + ".toml"
    for folder in config_folders():
        if (folder / name).is_file():
            return folder / name
    known = sorted({file.stem for folder in config_folders() for file in folder.glob("*.toml")})
    raise UserError(f"no experiment file {config!r}; {nearest(Path(name).stem, known)}shipped ones: {', '.join(known)}")


def read_experiment(config: str, overrides: Sequence[str] = (), preset: str = "") -> Experiment:
    """Experiment of a TOML file (path or shipped name) with `key=value` overrides applied last."""
    path = find_config(config)
    try:
        table = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    table.setdefault("name", path.stem)
    return _resolve(table, overrides, preset, str(path))


def parse_experiment(text: str, overrides: Sequence[str] = ()) -> Experiment:
    """Experiment of TOML text, e.g. the resolved settings that the server sends to its clients."""
    return _resolve(tomllib.loads(text), overrides, "", "settings")


def _resolve(table: dict, overrides: Sequence[str], preset: str, where: str) -> Experiment:
    changes = [parse_override(text) for text in overrides]
    asked = [value for key, value in changes if key == "preset"]
    changes = [(key, value) for key, value in changes if key != "preset"]
    presets = table.pop("presets", {})
    _check_tables(table, presets, where)
    preset = preset or (str(asked[-1]) if asked else str(table.get("preset", "")))
    table.pop("preset", None)
    table.setdefault("method", {}).setdefault("name", "fedavg")
    if preset:
        if preset not in presets:
            raise UserError(
                f"{where}: no preset {preset!r}; {nearest(preset, presets)}known: {', '.join(presets) or 'none'}"
            )
        table = _merge(table, presets[preset])
    for key, value in changes:
        _assign(table, key.split("."), value, key)
    return from_table(table, where, overrides)


def _check_tables(table: dict, presets: Any, where: str) -> None:
    """UserError for a section, or a preset, that is a single value."""
    for name in ("data", "model", "train", "method", "parts", "run"):
        if not isinstance(table.get(name, {}), dict):
            hint = f"; write [method] and name = {table[name]!r}" if name == "method" else ""
            raise UserError(f"{where}: {name} is a section, not a value{hint}")
    if not isinstance(presets, dict):
        raise UserError(f"{where}: presets is a section: each preset is a table, [presets.NAME.train]")
    for name, preset in presets.items():
        if not isinstance(preset, dict) or not all(isinstance(section, dict) for section in preset.values()):
            raise UserError(f"{where}: presets.{name} holds sections, e.g. [presets.{name}.train]")


def parse_override(text: str) -> tuple[str, Any]:
    """`"train.rounds=5"` -> `("train.rounds", 5)`; what is not a TOML value is taken as a string.

    A setting that is a text takes the words as they stand: `run.target=2020` is the domain "2020".
    """
    key, sign, value = text.partition("=")
    key, value = key.strip(), value.strip()
    if not sign or not key:
        raise UserError(f"override {text!r} is not of the form section.key=value")
    section, _, name = key.partition(".")
    known = SECTIONS[section].model_fields.get(name) if section in SECTIONS else None
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value
    return key, value if known and known.annotation is str and not isinstance(parsed, str) else parsed


def _assign(table: dict, path: list[str], value: Any, key: str) -> None:
    for name in path[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise UserError(f"override {key!r}: {name!r} is a value, not a section")
    table[path[-1]] = value


def _merge(base: dict, changes: dict) -> dict:
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def from_table(table: dict, where: str = "settings", overrides: Sequence[str] = ()) -> Experiment:
    """Validated Experiment of a nested table; UserError names the key, the nearest right one, and who set it."""
    try:
        return Experiment.model_validate(table)
    except ValidationError as error:
        key = ".".join(str(part) for part in error.errors()[0]["loc"])
        guilty = [text for text in overrides if _concerns(text.partition("=")[0].strip(), key)]
        raise UserError(f"{f'override {guilty[-1]!r}' if guilty else where}: {_explain(error)}") from None


def _concerns(override: str, key: str) -> bool:
    """Does an override's key set what an error is about: the same key, or one above or below it?"""
    return f"{key}.".startswith(f"{override}.") or f"{override}.".startswith(f"{key}.")


def _explain(error: ValidationError) -> str:
    """First problem of a validation error in one line."""
    problem = error.errors()[0]
    path = [str(part) for part in problem["loc"]]
    key = ".".join(path)
    if problem["type"] == "extra_forbidden":
        section = SECTIONS.get(path[0]) if len(path) > 1 else Experiment
        known = list(section.model_fields) if section else []
        return f"unknown setting {key!r}; {nearest(path[-1], known)}known here: {', '.join(known)}"
    given = repr(problem.get("input"))
    got = f" (got {given})" if key and len(given) < 80 else ""  # not the whole configuration
    return f"{key or 'experiment'}: {problem['msg'].removeprefix('Value error, ')}{got}"


def data_root(data: DataSettings) -> Path:
    """Folder in which the data set is looked for."""
    return Path(data.root or os.environ.get("FEDSIM_DATA", "data")).expanduser()


def cache_root(data: DataSettings) -> Path:
    """Folder of the decoded images."""
    return Path(data.cache or os.environ.get("FEDSIM_CACHE", "~/.cache/fedsim")).expanduser()
