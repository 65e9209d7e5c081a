"""fedsim: federated domain generalization on Flower and PyTorch.

model = fedsim.load("outputs/pacs/fedavg/sketch/seed0")
logits = model(model.prepare(["cat.jpg", "dog.jpg"]))
"""

import warnings
from typing import TYPE_CHECKING

from fedsim.about import DISTRIBUTION, VERSION, extra

if TYPE_CHECKING:
    from pathlib import Path

    from fedsim.export.trained import TrainedModel

__all__ = ["DISTRIBUTION", "__version__", "extra", "load"]
__version__ = VERSION


def load(run: "str | Path", which: str = "best") -> "TrainedModel":
    """The model of a finished run as a module that contains its transforms and inference rule; see `load_trained`."""
    from fedsim.export.trained import load_trained  # torch takes a second to import

    model = load_trained(run, which)
    if model.remark:
        warnings.warn(model.remark, stacklevel=2)
    return model
