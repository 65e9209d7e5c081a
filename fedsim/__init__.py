"""fedsim: federated domain generalization on Flower and PyTorch."""

DISTRIBUTION = "feddg-sim"  # its name on a package index; another project is called fedsim there
__version__ = "0.1.0"


def extra(name: str) -> str:
    """The command that installs an optional dependency, for messages."""
    return f"pip install '{DISTRIBUTION}[{name}]'"
