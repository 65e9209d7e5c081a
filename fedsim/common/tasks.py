"""The table of tasks: what is learned from a data set. Other modules do not depend on which task it is.

A row of BENCHMARKS names its task, and `data.task` another one. `rules` (in fedsim.models) defines the outputs, loss
and metrics, and `kept` (in fedsim.records) what a run keeps about the unseen domain's examples. The columns of all
records are named after the primary metric: `target_accuracy`, `target_dice`, `mean_validation_mae`, ...
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass

UNDEFINED = "undefined"  # how texts and tables show a metric that has no value on some data


@dataclass(frozen=True)
class Task:
    """One task.

    metric: the primary metric as it is written in the names of columns
    title: the name of the primary metric in texts
    rules, kept: "module:class", imported when needed
    less_is_better: whether a smaller value of the primary metric is better
    is_fraction: whether the primary metric lies between 0 and 1 and is shown in percent
    has_classes: whether every example has one class, which methods may use; data of other tasks have targets of their
        own, and their classes are strata
    can_be_undefined: whether some examples give the primary metric no value, as one class gives an AUROC none
    maps: whether there are targets for every pixel
    further: what each validation measures besides the primary metric
    """

    name: str
    metric: str
    title: str
    rules: str
    kept: str
    less_is_better: bool = False
    is_fraction: bool = True
    has_classes: bool = False
    can_be_undefined: bool = False
    maps: bool = False
    further: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """What follows a value in texts: a percent sign after a blank, or nothing."""
        return " %" if self.is_fraction else ""

    def number(self, value: float) -> str:
        """A value of the primary metric without its unit: `84.1` for a fraction, else four digits such as `3.218`."""
        if math.isnan(value):
            return UNDEFINED
        return f"{100 * value:.1f}" if self.is_fraction else f"{value:.4g}"

    def text(self, value: float) -> str:
        """A value of the primary metric with its unit."""
        return UNDEFINED if math.isnan(value) else f"{self.number(value)}{self.unit}"

    def upwards(self, values: Any) -> Any:
        """Values of the primary metric, or an array of them, turned so that the greatest one is the best."""
        return -values if self.less_is_better else values


CLASSIFICATION = Task(
    "classification",
    "accuracy",
    "accuracy",
    "fedsim.models.tasks:Classification",
    "fedsim.records.predictions:Predictions",
    has_classes=True,
)
BINARY = Task(
    "binary",
    "auroc",
    "AUROC",
    "fedsim.models.scores:Binary",
    "fedsim.records.predictions:Predictions",
    has_classes=True,
    can_be_undefined=True,
    further=("threshold",),
)
MULTI_LABEL = Task(
    "multi-label",
    "mean_auroc",
    "mean AUROC over labels",
    "fedsim.models.scores:MultiLabel",
    "fedsim.records.outputs:Outputs",
    can_be_undefined=True,
)
REGRESSION = Task(
    "regression",
    "mae",
    "mean absolute error",
    "fedsim.models.scores:Regression",
    "fedsim.records.outputs:Outputs",
    less_is_better=True,
    is_fraction=False,
)
SEGMENTATION = Task(
    "segmentation",
    "dice",
    "Dice",
    "fedsim.models.tasks:Segmentation",
    "fedsim.records.cases:Cases",
    can_be_undefined=True,
    maps=True,
)
TASKS = {task.name: task for task in (CLASSIFICATION, BINARY, MULTI_LABEL, REGRESSION, SEGMENTATION)}
BY_METRIC = {task.metric: task for task in TASKS.values()}
OF_TENSORS = (MULTI_LABEL.name, REGRESSION.name)  # whose targets only tables, arrays and Datasets can give
WITH_CLASSES = tuple(task.name for task in TASKS.values() if task.has_classes)
ANY_TASK = tuple(TASKS)
# Metrics of predicted classes by which a round may be selected, besides primary one and loss, with their titles.
OF_CLASSES = {"macro_f1": "macro F1", "auroc": "AUROC"}
SOURCE_TEST = "source_test_"  # and the primary metric: a column on images of sources that select nothing


def less_is_better(column: str) -> bool:
    """Whether a smaller value of a metric, or of the column of a record that holds it, is the better one."""
    falling = ["loss", *(task.metric for task in TASKS.values() if task.less_is_better)]
    return any(column == name or column.endswith(f"_{name}") for name in falling)


def fits(part_tasks: Iterable[str], task: str) -> bool:
    """Whether a part that is made for some tasks fits another one: what takes classes takes two of them."""
    made_for = set(part_tasks)
    return task in made_for or (TASKS[task].has_classes and CLASSIFICATION.name in made_for)


def task_in(columns: Iterable[str], prefix: str = "target_") -> Task:
    """The task whose primary metric, with `prefix` before it, is among these columns; otherwise classification."""
    present = set(columns)
    return next((task for task in TASKS.values() if f"{prefix}{task.metric}" in present), CLASSIFICATION)


def task_of(frame: Any, prefix: str = "target_") -> Task:
    """The task of a frame of records or of their `Columns`; columns without any value are ignored."""
    import numpy as np

    names = {f"{prefix}{task.metric}" for task in TASKS.values()}
    columns = []
    for column in frame.columns:
        if column in names and not np.isnan(np.asarray(frame[column], dtype=np.float64)).all():
            columns.append(column)
    return task_in(columns or frame.columns, prefix)


def scores(row: Mapping[str, Any]) -> list[tuple[str, float]]:
    """(name, value) of the primary metric in a row of rounds.csv, in validation and on the target, as far as known."""
    metric = task_in(row).metric
    columns = {"validation": f"mean_validation_{metric}", "target": f"target_{metric}"}
    return [(name, row[column]) for name, column in columns.items() if row.get(column) is not None]
