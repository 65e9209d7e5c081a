"""The task of a data set: what is learned from it. Other modules do not depend on which task it is.

A row of BENCHMARKS names its task. `rules` (in fedsim.models.tasks) defines the outputs, loss and metrics, and `kept`
(in fedsim.records) what a run keeps about the unseen domain's images. The columns of all records are named after the
primary metric: `target_accuracy`, `target_dice`, `mean_validation_dice`, ...
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Task:
    """One task.

    metric: the primary metric as it is written in the names of columns. It is a fraction; a larger value is better
    title: the name of the primary metric in texts
    rules, kept: "module:class", imported when needed
    """

    name: str
    metric: str
    title: str
    rules: str
    kept: str


CLASSIFICATION = Task(
    "classification",
    "accuracy",
    "accuracy",
    "fedsim.models.tasks:Classification",
    "fedsim.records.predictions:Predictions",
)
SEGMENTATION = Task("segmentation", "dice", "Dice", "fedsim.models.tasks:Segmentation", "fedsim.records.cases:Cases")
TASKS = {task.name: task for task in (CLASSIFICATION, SEGMENTATION)}
ANY_TASK = tuple(TASKS)
# Metrics of predicted classes by which a round may be selected, beside the primary one and the loss, with their titles.
OF_CLASSES = {"macro_f1": "macro F1", "auroc": "AUROC"}


def less_is_better(column: str) -> bool:
    """Whether a smaller value of a metric, or of the column of a record that holds it, is the better one."""
    return column == "loss" or column.endswith("_loss")


def task_in(columns: Iterable[str], prefix: str = "target_") -> Task:
    """The task whose primary metric, with `prefix` before it, is among these columns; otherwise classification."""
    present = set(columns)
    return next((task for task in TASKS.values() if f"{prefix}{task.metric}" in present), CLASSIFICATION)


def task_of(frame: "pd.DataFrame", prefix: str = "target_") -> Task:
    """The task of a frame of records; columns without any value are ignored."""
    columns = [column for column in frame.columns if column.startswith(prefix) and frame[column].notna().any()]
    return task_in(columns or frame.columns, prefix)


def scores(row: Mapping[str, Any]) -> list[tuple[str, float]]:
    """(name, value) of the primary metric in a row of rounds.csv, in validation and on the target, as far as known."""
    metric = task_in(row).metric
    columns = {"validation": f"mean_validation_{metric}", "target": f"target_{metric}"}
    return [(name, row[column]) for name, column in columns.items() if row.get(column) is not None]
