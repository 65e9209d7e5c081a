"""fedsim: federated domain generalization on Flower and PyTorch.

model = fedsim.load("outputs/pacs/fedavg/sketch/seed0")
logits = model(model.prepare(["cat.jpg", "dog.jpg"]))
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from fedsim.export.trained import TrainedModel

DISTRIBUTION = "feddg-sim"  # its name on a package index; another project is called fedsim there
__version__ = "0.1.0"


def extra(name: str) -> str:
    """The command that installs an optional dependency, for messages."""
    return f"pip install '{DISTRIBUTION}[{name}]'"


def load(run: "str | Path", which: str = "best") -> "TrainedModel":
    """The model of a finished run as a module with its transforms and inference rule; see `load_trained`."""
    from fedsim.export.trained import load_trained  # torch takes a second to import

    return load_trained(run, which)
