"""The environment of a run: Python, platform, package versions and the commit. It imports none of the packages."""

import os
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, Strict, StrictInt, ValidationError

from fedsim.common.about import FORMAT, FORMER_SLOTS, VERSION, installed_version
from fedsim.common.cores import free_cores
from fedsim.common.errors import UserError
from fedsim.records.readers import AGAIN, read_json

PACKAGES = (
    "torch",
    "torchvision",
    "timm",
    "flwr",
    "ray",
    "numpy",
    "pandas",
    "scipy",
    "scikit-learn",
    "pydantic",
    "safetensors",
    "pillow",
    "matplotlib",
)


THEN = ", then "  # between the versions of a package that a site had one after the other
Scalar = str | int | float | bool | None
Count = Annotated[StrictInt, Field(gt=0)]
Share = Annotated[tuple[StrictInt, Count], Strict(False)]  # so many images, of so many; JSON has a list


class _Recorded(BaseModel):
    """A table of environment.json. Other keys may have any value: nothing reads them."""

    model_config = ConfigDict(extra="allow", strict=True)


class DomainRecord(_Recorded):
    """The images of a domain."""

    images: int
    content: str


class SharedRecord(_Recorded):
    """The images that are there twice, by domain."""

    classes: dict[str, Share] = {}
    between: dict[str, Share] = {}
    validation: dict[str, Share] = {}


class FindingRecord(_Recorded):
    """One thing that the files of the data show."""

    text: str


class MachineRecord(_Recorded):
    """What computed some rounds."""

    python: Scalar = None
    machine: Scalar = None
    device: Scalar = None
    threads: Scalar = None
    git_commit: str = ""
    packages: dict[str, str] = {}


class EarlierRecord(MachineRecord):
    """What computed the rounds from one on, until the run was resumed elsewhere."""

    from_round: int


class TensorsRecord(_Recorded):
    """The form of examples that are no images."""

    shape: list[Count]
    features: list[str]
    numeric: int


class ScaleRecord(_Recorded):
    """Mean and standard deviation of every feature."""

    mean: list[float]
    std: list[float]


class DoubtRecord(_Recorded):
    """What the sources have fitted for `run.doubt`, and over how many validation examples of each client."""

    alpha: float
    temperature: Annotated[float, Field(gt=0)]
    threshold: float
    examples: dict[str, Count]


class EnvironmentRecord(MachineRecord):
    """The tables of environment.json that are read again, and their types."""

    from_round: int = 0
    earlier: list[EarlierRecord] = []
    data: dict[str, DomainRecord] = {}
    server_data: dict[str, DomainRecord] = {}
    recipe: dict[str, dict[str, Any]] = {}
    shared_images: SharedRecord | str | None = None
    findings: list[FindingRecord] = []
    domains: list[str] = []
    classes: list[str] = []
    targets: list[str] = []
    undefined: dict[str, str] = {}
    tensors: TensorsRecord | None = None
    scale: ScaleRecord | None = None
    doubt: DoubtRecord | None = None
    sites: dict[str, dict[str, str]] = {}


# What may change when a run is resumed: the keys of `environment()`, and what a session adds to them.
MAY_CHANGE = (
    "python",
    "platform",
    "machine",
    "cpu_count",
    "packages",
    "git_commit",
    "git_dirty",
    "device",
    "threads",
    "on_client_failure",
    "update_limit",
    "examples_limit",
)


# What a site says of itself in the handshake, whose versions are compared with the server's.
OF_SITES = ("fedsim", "python", "torch", "flwr", "numpy")


def own_versions() -> dict[str, str]:
    """The versions of this process that those of sites are compared with, by package."""
    versions = {"fedsim": VERSION, "python": platform.python_version()}
    for package in OF_SITES:
        if version := installed_version(package):
            versions.setdefault(package, version)
    return versions


def versions_so_far(
    recorded: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, str]]:
    """The versions of packages by site in all parts of a run: `2.1, then 2.2` where they have changed.

    recorded: those of the run so far. now: those of the sites that are there
    """
    versions = {site: dict(packages) for site, packages in recorded.items()}
    for site, packages in now.items():
        of_site = versions.setdefault(site, {})
        for package, version in packages.items():
            before = of_site.get(package, version)
            is_new = before.split(THEN)[-1] != version
            of_site[package] = f"{before}{THEN}{version}" if is_new else before
    return versions


def environment() -> dict[str, Any]:
    """Python, platform, CPU count, versions of the packages that numbers depend on, git commit and dirty flag."""
    table = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "cores_free": free_cores(),
        "packages": {"fedsim": VERSION} | {name: found for name in PACKAGES if (found := installed_version(name))},
    }
    return table | _git(Path(__file__).resolve())


def read_environment(run: Path) -> dict[str, Any]:
    """Return what environment.json of a run's folder holds; empty in a folder that holds no run.

    Raises UserError when it cannot be read, when its tables are not those that a run writes, or for another format.
    """
    file = run / "environment.json"
    if not file.is_file() and not (run / "experiment.toml").is_file():
        return {}
    record = read_json(file) if file.is_file() else {}
    if odd := _odd_table(record):
        raise UserError(
            f"{file}: {odd} is not what a run writes there, so that another program has changed it; {AGAIN}"
        )
    if record.get("format") != FORMAT:
        raise UserError(
            f"{file}: the run has {_format_text(record)}, and this version of fedsim reads format {FORMAT}; read it "
            "with the version that wrote it, or remove the folder and make the run again"
        )
    if "recipe" in record:
        record["recipe"] = _with_todays_slots(record["recipe"])
    return record


def _with_todays_slots(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded recipe, by `slot.part`, with the slots of a former version under their names of today."""
    todays = {}
    for name, fields in recipe.items():
        slot, part = name.split(".", 1)
        todays[f"{FORMER_SLOTS.get(slot, slot)}.{part}"] = fields
    return todays


def _format_text(record: Mapping[str, Any]) -> str:
    return f"format {record['format']!r}" if "format" in record else "no format"


def _odd_table(record: Any) -> str:
    """The table of a record that has another type than a run writes; empty when there is none."""
    try:
        EnvironmentRecord.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]["loc"]
        return repr(first[0]) if first else "the whole"
    return ""


def earlier_environments(recorded: Mapping[str, Any], now: Mapping[str, Any], done: int) -> dict[str, Any]:
    """What environment.json of a resumed run says in addition; empty when all its rounds had one environment.

    `from_round`: the first round of the present environment; `earlier`: the environments of the rounds before, each
    with its own `from_round`.

    recorded: the record of the run so far
    now: the present environment
    done: the last round that is not computed again; -1 without any
    """
    last = {key: recorded[key] for key in MAY_CHANGE if key in recorded}
    entries = []
    if last:
        entries = [*recorded.get("earlier", []), {**last, "from_round": recorded.get("from_round", 0)}]
    # An environment in which no round was completed leaves no trace in the records.
    entries = [entry for entry in entries if entry["from_round"] <= done]
    start = done + 1
    if entries and _is_alike(entries[-1], now):
        start = entries.pop()["from_round"]
    return {"from_round": start, "earlier": entries} if entries else {}


def _is_alike(entry: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the present environment has the values of an earlier one, where it has any."""
    return all(now.get(key, value) == value for key, value in entry.items() if key != "from_round")


def all_environments(recorded: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The environments of a run's record in the order of its rounds, each with a text such as ` from round 4`.

    A run that had only one has an empty text.
    """
    earlier = recorded.get("earlier", [])
    if not earlier:
        return [("", recorded)]
    return [(f" from round {entry['from_round']}", entry) for entry in [*earlier, recorded]]


@cache  # a process runs the code that was there at its start, even when the checkout changes later
def _git(file: Path) -> dict[str, Any]:
    """Commit and dirty flag of the checkout that tracks `file`; empty for an installed package."""
    # A package installed into a virtual environment inside somebody's checkout is not part of that checkout.
    if _run_git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return {}
    commit = _run_git(file.parent, "rev-parse", "HEAD")
    changes = _run_git(file.parent, "status", "--porcelain", "--untracked-files=no")
    return {"git_commit": commit, "git_dirty": bool(changes)} if commit else {}


def _run_git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
