"""The project's names and version, and the texts of messages that say what to install."""

DISTRIBUTION = "feddg-sim"  # its name on a package index; another project is called fedsim there
VERSION = "0.1.0"


def extra(name: str) -> str:
    """The command that installs an optional dependency, for messages."""
    return f"pip install '{DISTRIBUTION}[{name}]'"
