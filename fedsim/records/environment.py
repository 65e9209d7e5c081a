"""The environment of a run: Python, platform, package versions and the commit. It imports none of the packages."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fedsim.common.about import VERSION, installed_version
from fedsim.common.cores import free_cores
from fedsim.common.errors import UserError

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


# Of tables in environment.json: the keys that each of its own tables has at least.
TABLES = {"data": {"images", "content"}, "server_data": {"images", "content"}, "recipe": set()}
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
)


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
    """What environment.json of a run's folder holds; empty when there is none.

    Raises UserError when it cannot be read, or when its tables are not those that a run writes.
    """
    file = run / "environment.json"
    try:
        record = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:  # also what is not UTF-8
        raise UserError(f"{file}: {error}") from None
    if odd := _odd_table(record):
        raise UserError(f"{file}: {odd} is not what a run writes there, so that another program has changed it; copy "
                        "the file again, or remove the run's folder and repeat the run")  # fmt: skip
    return record


def _odd_table(record: Any) -> str:
    """The table of a record that is no table, or lacks something; empty when there is none."""
    if not isinstance(record, dict):
        return "the whole"
    for name, keys in TABLES.items():
        table = record.get(name, {})
        entries = table.values() if isinstance(table, dict) else [None]
        if not all(isinstance(entry, dict) and keys <= entry.keys() for entry in entries):
            return repr(name)
    earlier = record.get("earlier", [])
    if not isinstance(earlier, list):
        return "'earlier'"
    if not all(isinstance(entry, dict) and "from_round" in entry for entry in earlier):
        return "'earlier'"
    if not all(isinstance(entry.get("packages", {}), dict) for entry in (record, *earlier)):
        return "'packages'"
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
