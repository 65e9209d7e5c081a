"""fedsim: federated domain generalization on Flower and PyTorch. All that users import is here.

model = fedsim.load("outputs/pacs/fedavg/sketch/seed0")
logits = model(model.prepare(["cat.jpg", "dog.jpg"]))

The names of `PUBLIC` are imported when they are first used, because PyTorch takes a second to import.
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from fedsim.common.about import DISTRIBUTION, VERSION, extra

if TYPE_CHECKING:
    from pathlib import Path

    from fedsim.export.trained import TrainedModel

__version__ = VERSION

PUBLIC = {
    # a method of one's own
    "METHODS": "fedsim.methods.table",
    "Recipe": "fedsim.methods.recipe",
    "Share": "strategies.parts",
    "Weights": "strategies.parts",
    "Fuse": "strategies.parts",
    "Bank": "strategies.parts",
    "Broadcast": "strategies.parts",
    "Refine": "strategies.parts",
    "Visit": "strategies.parts",
    "Update": "strategies.parts",
    "ServerRound": "strategies.parts",
    "RefusedUpdateError": "strategies.parts",
    "LostRoundError": "strategies.parts",
    "Objective": "clients.parts",
    "LocalUpdate": "clients.parts",
    "Companion": "clients.parts",
    "Step": "clients.parts",
    "Term": "clients.parts",
    "Batches": "clients.parts",
    "Augment": "clients.parts",
    "Report": "clients.parts",
    "Unlabelled": "clients.parts",
    "LocalRound": "clients.parts",
    "Batch": "clients.parts",
    "Norm": "fedsim.models.norms.base",
    "Insert": "fedsim.models.inserts.base",
    "Infer": "fedsim.models.infer.base",
    "Fact": "fedsim.parts.facts",
    "findings": "fedsim.testing.contract",
    "run_watched": "fedsim.testing.contract",
    # in Flower apps of your own
    "strategy": "fedsim.apps.strategy",
    "client_app": "fedsim.apps.own_client",
    "FedDG": "strategies.base",
    # data and networks of your own
    "Reader": "fedsim.data.reader",
    "Backbone": "fedsim.models.layout",
    # runs and their results
    "Experiment": "fedsim.settings.experiment",
    "read_experiment": "fedsim.settings.experiment",
    "run": "fedsim.commands.notebook",
    "sweep": "fedsim.commands.notebook",
    "compare": "fedsim.commands.notebook",
    "launch": "fedsim.runtime.launch",
    "RunCallback": "fedsim.records.callbacks",
    "UserError": "fedsim.common.errors",
    "ClientFailedError": "fedsim.common.errors",
}

__all__ = ["DISTRIBUTION", "__version__", "extra", "load", *PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'fedsim' has no attribute {name!r}")
    return getattr(importlib.import_module(PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def load(run: "str | Path", which: str = "best", trust: bool = False) -> "TrainedModel":
    """The model of a finished run as a module that contains its transforms and inference rule; see `load_trained`.

    trust: modules outside fedsim that the run's folder names are imported, so that their code runs
    """
    from fedsim.export.trained import load_trained  # torch takes a second to import

    model = load_trained(run, which, trust)
    if model.remark:
        warnings.warn(model.remark, stacklevel=2)
    return model
