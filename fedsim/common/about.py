"""The project's names and version, and texts for messages that say what to install."""

import importlib
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from fedsim.common.errors import UserError

DISTRIBUTION = "feddg-sim"  # its name on a package index; another project is called fedsim there
VERSION = "0.2.0"
FORMER_SLOTS = {"client": "step"}  # {a name in the files of version 0.2.0 and before: the slot's name now}
FORMAT = 1  # of a run's folder, its checkpoint and the image cache; another number is not read (docs/versions.md)


def extra(name: str) -> str:
    """The command that installs an optional dependency, for messages."""
    return f"pip install '{DISTRIBUTION}[{name}]'"


def optional(module: str, need: str, name: str) -> Any:
    """The module of an optional dependency; without it a UserError says what needs it, and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"{need}: {extra(name)}") from None


@cache
def installed_version(package: str) -> str:
    """Return the installed version of a distribution; empty when it is not installed.

    importlib.metadata reads all metadata for it, and PyTorch's take 3 ms; their head has the version.
    """
    try:
        installed = distribution(package)
    except PackageNotFoundError:
        return ""
    head, _, _ = (installed.read_text("METADATA") or "").partition("\n\n")
    for line in head.splitlines():
        key, _, value = line.partition(": ")
        if key == "Version":
            return value.strip()
    return installed.version
