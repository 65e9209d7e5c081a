"""The targets of examples that have no class: a number each, or several labels of 0 and 1."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedsim.common.errors import UserError
from fedsim.common.tasks import MULTI_LABEL, OF_TENSORS, REGRESSION
from fedsim.settings import DataSettings

STRATUM = "all"  # the one class that stands for all examples, where they have none
LEAST = 1e-5  # errors of smaller numbers would have less than four digits, because scores are compared to nine decimals


def targets_or_classes(data: DataSettings, names: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a data set's row that say what its labels are, given the names of classes or targets."""
    if data.task in OF_TENSORS:
        return {"classes": (STRATUM,), "structures": names}
    return {"classes": names}


def declared_outputs(data: DataSettings) -> tuple[str, ...]:
    """The names of the targets that the settings give; () where the data name them, and where examples have classes."""
    if data.task not in OF_TENSORS:
        return ()
    names = data.columns.get("label", "")
    if data.task != REGRESSION.name:
        return tuple(names) if isinstance(names, list) else tuple(data.classes)
    if isinstance(names, str) and names:
        return (names,)
    return ("label",)


def checked_targets(values: np.ndarray, task: str, where: str) -> np.ndarray:
    """The targets as float32 [N, Q], of an array [N] or [N, Q].

    Raises UserError with the number of the first that is not finite, or that is no label of 0 and 1. It also refuses an
    array of another shape or kind.
    """
    if values.dtype.kind not in "fiub":
        raise UserError(f"{where} is {values.dtype}; data.task = {task!r} needs numbers")
    targets = values[:, None] if values.ndim == 1 else values
    has_number = task == REGRESSION.name
    fits = targets.ndim == 2 and targets.shape[1] > 0
    if not fits or (has_number and targets.shape[1] > 1):
        shape = "[N]" if has_number else "[N, L]"
        raise UserError(f"{where} has the shape {list(values.shape)}; data.task = {task!r} needs {shape}")
    is_wrong, fault = wrong_targets(targets, task)
    for row, column in np.argwhere(is_wrong)[:1]:
        value = targets[row, column]
        raise UserError(f"{where}[{row}]: {value} is {fault}, which data.task = {task!r} needs")
    refuse_tiny(targets, task, where)
    return targets.astype(np.float32)


def refuse_tiny(targets: np.ndarray, task: str, where: str) -> None:
    """Raises UserError for numbers that are all so small that their errors count as equal."""
    if task != REGRESSION.name or not targets.size:
        return
    largest = float(np.abs(targets).max())
    if 0 < largest < LEAST:
        raise UserError(
            f"{where}: the largest label is {largest:.3g}, and errors are compared to nine decimals; write the labels "
            "in a smaller unit"
        )


def wrong_targets(targets: np.ndarray, task: str) -> tuple[np.ndarray, str]:
    """(which of the targets a task cannot have, bool of their shape, what these are, in words)."""
    if task == REGRESSION.name:
        return ~np.isfinite(targets), "no finite number"
    return ~np.isin(targets, (0, 1)), "neither 0 nor 1"


def names_of_targets(data: DataSettings, targets: Mapping[str, np.ndarray], where: object) -> tuple[str, ...]:
    """The names of the targets [N, Q] of all domains: `label` for a number, else those of the settings, or 0, 1, ...

    Raises UserError where domains have different numbers of them, and where the settings name another number.
    """
    counts = {}
    for domain, of_domain in targets.items():
        counts[domain] = of_domain.shape[1]
    count, *others = set(counts.values())
    if others:
        shown = ", ".join(f"{domain} {number}" for domain, number in counts.items())
        raise UserError(f"{where}: the domains have different numbers of labels: {shown}")
    if data.task == REGRESSION.name:
        return ("label",)
    names = tuple(data.classes)
    if not names:
        names = tuple(map(str, range(count)))
    if len(names) != count:
        raise UserError(f"{where}: there are {count} labels, and data.classes names {len(names)}")
    return names


def kind_of_target(task: str) -> str:
    """What the target of one item of a Dataset must be, in words."""
    if task == MULTI_LABEL.name:
        return "a list or tensor of 0 and 1"
    return "a number"
