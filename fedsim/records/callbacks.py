"""Callbacks of a run: progress bars, TensorBoard, W&B, MLflow, and classes that a user names as `module:name`."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fedsim.common.about import optional
from fedsim.common.errors import UserError
from fedsim.settings import RunSettings
from fedsim.settings.experiment import Experiment
from fedsim.settings.plugins import load, makes

HOOKS = ("on_start", "on_round", "on_end")
SHIPPED = {"wandb": "fedsim.records.trackers:WandB", "mlflow": "fedsim.records.trackers:MLflow"}


@runtime_checkable
class RunCallback(Protocol):
    """An object whose methods are called during a run. They must not change their arguments.

    A callback may also have `on_failure(error)`. It is called when a run stops before its end, even before its start,
    and also after Ctrl-C.

        >>> class Print(RunCallback):
        ...     def on_round(self, row, clients):
        ...         print(row["round"], len(clients), "clients")
        >>> Print().on_round({"round": 1}, [{}, {}, {}])
        1 3 clients
    """

    def on_start(self, experiment: Experiment, folder: Path) -> None:
        """Called before the first round, or before the next round of a resumed run; the folder exists."""
        return  # a body: a class may derive from this one and define some of the methods

    def on_round(self, row: dict[str, Any], clients: list[dict[str, Any]]) -> None:
        """Called after each round, with the rows that were added to rounds.csv and clients.csv."""
        return

    def on_end(self, summary: dict[str, Any]) -> None:
        """Called after the summary was written."""
        return


def trackers(run: RunSettings) -> list[RunCallback]:
    """New callbacks for one run, as `run.tensorboard` and `run.callbacks` ask for; UserError when one is missing."""
    classes = [find_callback(name) for name in run.callbacks]
    callbacks: list[RunCallback] = [TensorBoardCallback()] if run.tensorboard else []
    return callbacks + [make() for make in classes]


def find_callback(name: str) -> Callable[[], RunCallback]:
    """The class, or the function that is declared to return one, that `wandb`, `mlflow` or `package.module:name` names.

    The working folder is searched too. Raises UserError when there is no such module or name in it.
    """
    make = load(SHIPPED.get(name, name), "callback")
    if not makes(make, RunCallback):
        what = "is neither a class nor a function that says -> and the name of one"
        if isinstance(make, type):
            what = f"has no {', '.join(hook for hook in HOOKS if not hasattr(make, hook))}"
        raise UserError(f"callback {name!r} {what}; see RunCallback in {__name__}")
    return make


def tell_failure(callbacks: Iterable[RunCallback], error: BaseException) -> None:
    """Call `on_failure` of the callbacks that have it."""
    for callback in callbacks:
        if hasattr(callback, "on_failure"):
            callback.on_failure(error)


class TensorBoardCallback:
    """Writes every number of a round as TensorBoard scalars into the run's folder, `tensorboard/`.

    Raises UserError on construction when TensorBoard is not installed.
    """

    def __init__(self) -> None:
        module = optional("torch.utils.tensorboard", "run.tensorboard needs TensorBoard", "tensorboard")
        self._open = module.SummaryWriter
        self._folder: Path | None = None
        self._writer: Any = None

    def on_start(self, experiment: Experiment, folder: Path) -> None:
        """Remember the folder; the writer opens with the first round, whose number it needs."""
        self._folder = folder / "tensorboard"

    def on_round(self, row: dict[str, Any], clients: Sequence[dict[str, Any]]) -> None:
        """Write the scalars `round/<column>` and `<client>/<column>`."""
        step = int(row["round"])
        if self._writer is None:
            # A resumed run repeats rounds that were written after its checkpoint: those points are purged.
            self._writer = self._open(str(self._folder), purge_step=step)
        for name, value in scalars(row, clients).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def on_end(self, summary: dict[str, Any]) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()


def scalars(row: dict[str, Any], clients: Iterable[dict[str, Any]]) -> dict[str, float]:
    """The numbers of a round as `round/<column>` and `<client>/<column>`; texts and NaN are left out."""
    values = numbers(row, "round")
    for client in clients:
        values |= numbers(client, str(client.get("client", "client")))
    return values


def numbers(table: dict[str, Any], prefix: str) -> dict[str, float]:
    """The numbers of a row as `prefix/<column>`, without that of its round."""
    values = {}
    for column, value in table.items():
        if column != "round" and _is_number(value):
            values[f"{prefix}/{column}"] = float(value)
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
