"""The project's names and version, and texts for messages that say what to install."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "feddg-sim"  # its name on a package index; another project is called fedsim there
VERSION = "0.1.0"


def extra(name: str) -> str:
    """The command that installs an optional dependency, for messages."""
    return f"pip install '{DISTRIBUTION}[{name}]'"


@cache  # reading the metadata of a package takes milliseconds, and a simulation needs them for every client
def installed_version(package: str) -> str:
    """The installed version of a distribution; empty when it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
