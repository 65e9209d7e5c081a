"""One TOML file is one experiment. This is the only module that parses settings; `fedsim.settings` declares them.

    experiment = read_experiment("configs/pacs.toml", overrides=["train.rounds=5", "method.guiding_head.weight=0.25"])

Order of precedence: the file, then its preset (`preset = "csac"` picks `[presets.csac]`), then the overrides.
"""

import copy
import hashlib
import json
import re
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_origin

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from fedsim.common.about import FORMER_SLOTS
from fedsim.common.errors import UserError, nearest
from fedsim.settings import DataSettings, ModelSettings, RunSettings, Settings, TrainSettings, folder_name


class Experiment(Settings):
    """One experiment, resolved: all settings on which a run depends."""

    name: Annotated[str, AfterValidator(folder_name), Field(min_length=1)] = "experiment"
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    train: TrainSettings = TrainSettings()
    method: dict[str, Any] = {"name": "fedavg"}
    parts: dict[str, dict[str, Any]] = Field(
        {}, description="fields of parts on this data set, for recipes that have them"
    )
    run: RunSettings = RunSettings()
    _preset: tuple[str, tuple[str, ...]] = PrivateAttr(("", ()))  # its name, and keys of [method] that it alone sets
    _app: dict[str, Any] | None = PrivateAttr(None)  # in records of clients with an app's own code: the configs sent

    @field_validator("method", mode="before")
    @classmethod
    def _slots_have_todays_names(cls, method: Any) -> Any:
        """The settings of the method, with a slot of a former version under its name of today."""
        if not isinstance(method, dict):
            return method
        todays = {FORMER_SLOTS.get(key, key): value for key, value in method.items()}
        if len(todays) < len(method):
            raise ValueError("the slot `step` is given twice, because `client` is its former name; leave `client` out")
        return todays

    @model_validator(mode="after")
    def _method_has_name(self) -> "Experiment":
        if not isinstance(self.method.get("name"), str) or not self.method["name"]:
            raise ValueError("method.name is missing: give the name of a method (see `fedsim methods`)")
        return self

    @model_validator(mode="after")
    def _data_knows_the_seed(self) -> "Experiment":
        data = self.data.model_copy()
        data._run_seed = self.run.seed
        data._validation_domain = self.run.validation_domain
        data._target = self.run.target if data.columns else ""  # the categories of a table are those of the sources
        object.__setattr__(self, "data", data)  # a copy, because other experiments may share the original
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
        changed = from_table(_merge(self.model_dump(), sections))
        changed._preset = self._preset
        return changed

    @property
    def preset(self) -> tuple[str, tuple[str, ...]]:
        """(name, keys of `[method]`) of a preset that changes the parts of whichever method is run; ("", ()) otherwise.

        Only an experiment that was read with that preset has it, not one that was read from resolved settings.
        """
        return self._preset

    @property
    def app(self) -> dict[str, Any] | None:
        """The configs that clients with an app's own code were sent, in records of such a run; None for other runs."""
        return self._app

    def of_app(self, configs: dict[str, Any] | None) -> "Experiment":
        """Returns a copy whose clients had an app's own code, and were sent these configs; None: they had fedsim's."""
        changed = self.model_copy()
        changed._app = configs
        return changed

    def settings_hash(self) -> str:
        """A short hash of everything that the numbers of a run depend on, except method, target and seed."""
        table = self.model_dump()
        del table["method"], table["name"]
        table["run"] = {key: table["run"][key] for key in ("select_on", "on_client_failure")}
        table["run"] |= {"validation_domain": self.run.validation_domain} if self.run.validation_domain else {}
        table["run"] |= {"select_by": self.run.select_by} if self.run.select_by != "primary" else {}
        table["run"] |= {"attackers": self.run.attackers} if self.run.attackers else {}
        for name in ("update_limit", "examples_limit"):
            limit = getattr(self.run, name)
            if limit != RunSettings().model_dump()[name]:
                table["run"][name] = limit
        for key in ("root", "cache", "accept"):
            del table["data"][key]
        # Settings that came later; runs from before them have the same hash.
        for key, usual in (
            ("shape", []),
            ("scale", "auto"),
            ("missing", "mean"),
            ("group", ""),
            ("levels", ""),
            ("classes_per_client", 2),
        ):
            if table["data"][key] == usual:
                del table["data"][key]
        later: dict[str, Any] = {"stop_after": 0, "availability": {}, "lost_replies": 0.0, "dp_max_epsilon": 0.0}
        table["train"] = {key: value for key, value in table["train"].items() if value != later.get(key, ...)}
        return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:10]


# Settings of [train] that are the server's also where the clients have an app's own code.
OF_ROUNDS = (
    "rounds", "clients_per_round", "evaluate_clients", "evaluate_every", "stop_after", "dp_max_epsilon", "availability",
    "lost_replies",
)  # fmt: skip
SECTIONS: dict[str, type[BaseModel]] = {
    "data": DataSettings,
    "model": ModelSettings,
    "train": TrainSettings,
    "run": RunSettings,
}
# A table that replaced a whole section would drop what the file and the preset say in it.
SECTION_EXAMPLES = {
    "data": "data.image_size=32", "model": "model.backbone=resnet18", "train": "train.lr=0.1",
    "method": "method.name=fedavg", "parts": "parts.proximal.mu=0.1", "run": "run.threads=1",
}  # fmt: skip


def config_folders() -> list[Path]:
    """The folders in which configs are searched by name: of the source tree (or of a FAB), then of the package."""
    package = Path(__file__).parents[1]
    return [package.parent / "configs", package / "_configs"]


def known_tables() -> list[str]:
    """Names of the shipped tables of papers."""
    return sorted({file.stem for folder in config_folders() for file in (folder / "tables").glob("*.toml")})


def find_config(config: str) -> Path:
    """Path of a config given as a path or by name (`pacs`, `configs/pacs.toml`).

    Another folder is the user's own: a missing file there is not replaced by a shipped one of the same name.
    """
    path = Path(config)
    if path.is_file():
        return path
    parent, _, last = config.rpartition("/")
    name = last if path.suffix == ".toml" else last + ".toml"
    for folder in config_folders() if parent in ("", "configs") else ():
        if (folder / name).is_file():
            return folder / name
    if parent in ("", "tables", "configs/tables") and any((at / "tables" / name).is_file() for at in config_folders()):
        raise UserError(f"{config} is a table of a paper, which has many runs: fedsim sweep {config}")
    if path.is_dir():
        raise UserError(f"{config!r} is a folder and no experiment file; `fedsim datasets folder` shows one for images")
    shipped = sorted({file.stem for folder in config_folders() for file in folder.glob("*.toml")})
    local = path.with_suffix(".toml")
    alike = f"did you mean {str(local)!r}? " if local.is_file() else nearest(Path(name).stem, shipped)
    raise UserError(f"no experiment file {config!r}; {alike}shipped ones: {', '.join(shipped)}")


def read_experiment(config: str, overrides: Sequence[str] = (), preset: str = "") -> Experiment:
    """Experiment of a TOML file (path or shipped name) with `key=value` overrides applied last.

    >>> experiment = read_experiment("digits", ["train.rounds=5", "method.name=fedprox"])
    >>> experiment.train.rounds, experiment.method_name
    (5, 'fedprox')
    """
    path = find_config(config)
    try:
        table = copy.deepcopy(_parsed(path.read_text(encoding="utf-8-sig")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not valid TOML: {error}{_toml_hint(path, error)}") from None
    if "blocks" in table:
        raise UserError(f"{path} is a table of a paper, which has many runs: fedsim sweep {config}")
    if not table:
        raise UserError(f"{path}: no setting is in it, and without one the run would be on the data set digits")
    table.setdefault("name", path.stem)
    return _resolve(table, overrides, preset, str(path))


def _toml_hint(path: Path, error: Exception) -> str:
    """What to write in place of what is not TOML in a file; empty where it is not known."""
    if isinstance(error, UnicodeDecodeError):
        return "; save it as UTF-8"
    place = re.search(r"at line (\d+)", str(error))
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    line = lines[int(place[1]) - 1] if place and int(place[1]) <= len(lines) else ""
    if "\\" in line and ("scape" in str(error) or "hex" in str(error)):
        return "; \\ has a meaning of its own in \"...\": write the path with /, or in '...'"
    if truth := re.search(r"=\s*(True|False|None)\b", line):
        return f"; write {truth[1].lower()}" if truth[1] != "None" else "; leave the setting out"
    return '; write text in quotes: dataset = "folder"' if "Invalid value" in str(error) else ""


@cache
def _parsed(text: str) -> dict[str, Any]:
    """A file's table, which may not be changed: a sweep reads the same file for each of its runs."""
    return tomllib.loads(text)


def parse_experiment(text: str, overrides: Sequence[str] = ()) -> Experiment:
    """Experiment of TOML text, e.g. the resolved settings that the server sends to its clients."""
    return _resolve(tomllib.loads(text), overrides, "", "settings")


def _resolve(table: dict, overrides: Sequence[str], preset: str, where: str) -> Experiment:
    """The experiment of a file's table, with a preset and overrides. `where` names the file in messages."""
    changes, named = _changes_of(overrides)
    if preset and named and named != preset:
        raise UserError(f"--set preset={named}: --preset gives another one, {preset!r}; remove one of the two")
    presets = table.pop("presets", {})
    _check_tables(table, presets, where)
    preset = preset or named or str(table.get("preset", ""))
    table.pop("preset", None)
    table.setdefault("method", {}).setdefault("name", "fedavg")
    if preset:
        if preset not in presets:
            names = ", ".join(presets) or "none"
            raise UserError(f"{where}: no preset {preset!r}; {nearest(preset, presets)}known: {names}")
        table = _merge(table, presets[preset])
    for key, value in changes:
        assign(table, key, value)
    experiment = from_table(table, where, overrides)
    method = presets[preset].get("method", {}) if preset else {}
    if method.get("name") != experiment.method_name:
        changed = {".".join(key.split(".")[:2]) for key, _ in changes}
        keys = tuple(sorted(key for key in method if key != "name" and f"method.{key}" not in changed))
        experiment._preset = (preset, keys) if keys else ("", ())
    return experiment


def _changes_of(overrides: Sequence[str]) -> tuple[list[tuple[str, Any]], str]:
    """(the (key, value) pairs of overrides, the preset that they name or an empty text).

    Raises UserError for a whole section, and for a part that is set both in [parts] and in [method].
    """
    changes = [parse_override(text) for text in overrides]
    for text, (key, _) in zip(overrides, changes):
        if key in SECTION_EXAMPLES:
            example = SECTION_EXAMPLES[key]
            raise UserError(f"override {text!r}: {key} is a section; set single keys, for example --set {example}")
    presets = [str(value) for key, value in changes if key == "preset"]
    changes = [(key, value) for key, value in changes if key != "preset"]
    in_method = [key for key, _ in changes if key.startswith("method.")]
    for key, _ in changes:
        twice = [other for other in in_method if overlap(key, other)] if key.startswith("parts.") else []
        if twice:
            raise UserError(f"--set {key}: --set gives {twice[0]} too, which is taken; remove one of the two")
    return changes, presets[-1] if presets else ""


def _check_tables(table: dict, presets: Any, where: str) -> None:
    """Raise UserError when a section or a preset is a single value."""
    for name in SECTION_EXAMPLES:
        if not isinstance(table.get(name, {}), dict):
            hint = f"; write [method] and name = {table[name]!r}" if name == "method" else ""
            raise UserError(f"{where}: {name} is a section, not a value{hint}")
    if not isinstance(presets, dict):
        raise UserError(f"{where}: presets is a section: each preset is a table, [presets.NAME.train]")
    for name, preset in presets.items():
        if not isinstance(preset, dict) or not all(isinstance(section, dict) for section in preset.values()):
            raise UserError(f"{where}: presets.{name} holds sections, e.g. [presets.{name}.train]")


def parse_override(text: str) -> tuple[str, Any]:
    """`"train.rounds=5"` -> `("train.rounds", 5)`; a value that is not TOML is taken as text.

    A setting whose value is text takes the characters unchanged: `run.target=2020` is the domain "2020".

        >>> parse_override("method.guiding_head.weight=0.25")
        ('method.guiding_head.weight', 0.25)
    """
    if any("\ud800" <= sign <= "\udfff" for sign in text):  # what Python makes of bytes that no text has
        raise UserError(f"override {text!r} is not text in UTF-8; write other characters")
    key, sign, value = text.partition("=")
    key, value = key.strip(), value.strip()
    if not sign or not key:
        raise UserError(f"override {text!r} is not of the form section.key=value")
    section, _, name = key.partition(".")
    field = SECTIONS[section].model_fields.get(name) if section in SECTIONS else None
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value
    return key, value if field and field.annotation is str and not isinstance(parsed, str) else parsed


def with_options(overrides: Sequence[str], options: Sequence[str]) -> list[str]:
    """The overrides, and after them those that options such as --seed stand for; UserError for two values of a key."""
    given = dict(map(parse_override, options))
    for text in overrides:
        key, value = parse_override(text)
        if given.get(key, value) != value:
            raise UserError(f"--set {text}: an option gives {key} another value, {given[key]!r}; remove one of the two")
    return [*overrides, *options]


def assign(table: dict, key: str, value: Any) -> None:
    """Set the value of an override's key in a nested table. `parts.package.module:Class.weight` has a module's dots."""
    part, _, field = key.removeprefix("parts.").rpartition(".")
    of_module = key.startswith("parts.") and ":" in part
    *path, last = ["parts", part.strip("\"'"), field] if of_module else key.split(".")
    for name in path:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise UserError(f"override {key!r}: {name!r} is a value, not a section")
    table[last] = value


def _merge(base: dict, changes: dict) -> dict:
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def from_table(table: dict, where: str = "settings", overrides: Sequence[str] = ()) -> Experiment:
    """A validated Experiment of a nested table.

    A UserError names the wrong key, the most similar correct key, and the file or override that sets it.
    """
    try:
        return Experiment.model_validate(table)
    except ValidationError as error:
        problem = _of_union(error.errors())
        key = ".".join(str(part) for part in problem["loc"])
        guilty = [text for text in overrides if overlap(text.partition("=")[0].strip(), key)]
        raise UserError(f"{f'override {guilty[-1]!r}' if guilty else where}: {_explain(problem)}") from None


def overlap(one: str, other: str) -> bool:
    """Whether two dotted keys are equal, or one of them names a table that contains the other.

    `parts.NAME` and `method.NAME` are one part, whose value in [method] is taken.
    """
    one, other = (re.sub("^parts[.]", "method.", key) + "." for key in (one, other))
    return one.startswith(other) or other.startswith(one)


AS_TOML = {"bool_type": "; write true or false", "list_type": '; write a list such as ["a", "b"]'}


def _of_union(problems: Sequence[ErrorDetails]) -> ErrorDetails:
    """The first problem. Of a setting of several types: what the types that fit best say, without their names."""
    first = problems[0]
    section, name, *rest = (*first["loc"], "", "")
    field = SECTIONS[section].model_fields.get(str(name)) if section in SECTIONS else None
    if not rest or field is None or get_origin(field.annotation) not in (Union, UnionType):
        return first
    of_setting = [problem for problem in problems if problem["loc"][:2] == first["loc"][:2]]
    depth = max(len(problem["loc"]) for problem in of_setting)
    best = [problem for problem in of_setting if len(problem["loc"]) == depth]
    text = ", or ".join(problem["msg"] for problem in best)
    return {**best[0], "loc": (section, name, *best[0]["loc"][3:]), "msg": text}


def _as_part(name: str, value: Any) -> str:
    """How a field is written if the unknown section of this name is a part; empty for a value that is no section."""
    if not isinstance(value, dict) or not value:
        return ""
    field = next(iter(value))
    return f"if it is a part, write method.{name}.{field}; "


def _explain(problem: ErrorDetails) -> str:
    """A problem of a validation error in one line."""
    path = [str(part) for part in problem["loc"]]
    key = ".".join(path)
    if problem["type"] == "extra_forbidden":
        section: type[BaseModel] | None = SECTIONS.get(path[0]) if len(path) > 1 else Experiment
        fields = list(section.model_fields) if section else []
        inside = [f"{name}.{path[-1]}" for name, model in SECTIONS.items() if path[-1] in model.model_fields]
        alike = f"did you mean {inside[0]!r}? " if inside else nearest(path[-1], fields)
        of_part = _as_part(key, problem["input"]) if len(path) == 1 else ""
        return f"unknown setting {key!r}; {alike}{of_part}known here: {', '.join(fields)}"
    given = repr(problem.get("input"))
    got = f" (got {given})" if key and len(given) < 80 else ""  # long values, such as all settings, are not shown
    hint = AS_TOML.get(problem["type"], "")
    return f"{key or 'experiment'}: {problem['msg'].removeprefix('Value error, ')}{got}{hint}"
