"""Reads a map-style torch Dataset of (tensor, target) into two checked arrays: float32 values and integer labels.

    values, labels = read_tensors(dataset, "hospital_1")      # float32 [N, ...], int64 [N]

Values are taken as they are. In particular uint8 is not divided by 255, because nothing says that it is a picture.
"""

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from fedsim.common.errors import UserError, first_line
from fedsim.common.tasks import OF_TENSORS
from fedsim.data.targets import checked_targets, kind_of_target

READ = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8)


class Tensors(NamedTuple):
    """The examples of one domain: values float32 [N, ...], and labels.

    Labels are int64 [N] as the data set numbers them, or targets float32 [N, Q] of a task without classes.
    """

    values: np.ndarray
    labels: np.ndarray


def read_tensors(dataset: Any, name: str, task: str = "") -> Tensors:
    """Reads all items of a map-style Dataset in their order; `name` is what messages call it, such as a domain.

    task: `data.task`, which says whether targets are the numbers of classes

    Raises UserError for an empty data set, and for the first item that is no pair or whose target is no integer (or not
    what the task needs). So it does for a tensor that is neither float nor uint8, that has another shape than the first
    one, or that holds NaN or infinity.
    """
    _check_dataset(dataset, name)
    values: list[torch.Tensor] = []
    numbers: list[int] = []
    targets: list[np.ndarray] = []
    for index in range(len(dataset)):
        where = f"{name}, item {index}"
        tensor, target = _pair(dataset, index, where)
        values.append(_values(tensor, where))
        if task in OF_TENSORS:
            targets.append(_targets(target, task, where))
        else:
            numbers.append(_label(target, where))
        shape, first_shape = list(values[-1].shape), list(values[0].shape)
        if shape != first_shape:
            shapes = f"{shape}, but item 0 has {first_shape}"
            raise UserError(f"{where}: its tensor has the shape {shapes}; all items need one shape")
    labels = np.array(numbers, np.int64)
    if task in OF_TENSORS:
        labels = _stacked(targets, task, name)
    return Tensors(torch.stack(values).numpy(), labels)


def _check_dataset(dataset: Any, name: str) -> None:
    """Raises UserError for what is no map-style Dataset, and for an empty one."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        kind = type(dataset).__name__
        raise UserError(f"{name}: {kind} is no map-style Dataset; it needs __len__ and __getitem__")
    if not len(dataset):
        raise UserError(f"{name}: the Dataset is empty; give at least one item (tensor, target)")


def _stacked(targets: list[np.ndarray], task: str, name: str) -> np.ndarray:
    """The targets [Q] of all items as float32 [N, Q], checked; UserError where their numbers differ."""
    counts = sorted({len(target) for target in targets})
    if len(counts) > 1:
        shown = ", ".join(map(str, counts))
        raise UserError(f"{name}: items have different numbers of labels: {shown}")
    return checked_targets(np.stack(targets), task, f"{name}, targets")


def _targets(target: Any, task: str, where: str) -> np.ndarray:
    """The target of an item as float64 [Q]."""
    try:
        return np.asarray(target, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError, RuntimeError):
        given = repr(target)[:40]
        raise UserError(
            f"{where}: its target {given} is not {kind_of_target(task)}, which data.task = {task!r} needs"
        ) from None


def _pair(dataset: Any, index: int, where: str) -> tuple[Any, Any]:
    """One item as (tensor, target)."""
    try:
        item = dataset[index]
    except UserError:
        raise
    except Exception as error:  # the user's own code may raise any error
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{where} cannot be read ({reason})") from error
    kind = type(item).__name__
    if not isinstance(item, tuple | list):
        raise UserError(f"{where} is a {kind}, not a pair (tensor, target)")
    if len(item) != 2:
        raise UserError(f"{where} is a {kind} of {len(item)}, not a pair (tensor, target)")
    tensor, target = item
    return tensor, target


def _values(tensor: Any, where: str) -> torch.Tensor:
    """The tensor of an item as float32 on the CPU."""
    try:
        values = torch.as_tensor(tensor) if isinstance(tensor, np.ndarray) else tensor
    except TypeError:  # an array of texts or objects
        values = tensor
    if not isinstance(values, torch.Tensor):
        kind = type(tensor).__name__
        raise UserError(f"{where}: {kind} is no tensor; give (tensor, target), such as (torch.tensor([0.5, 1.0]), 0)")
    if values.dtype not in READ:
        kind = str(values.dtype).removeprefix("torch.")
        raise UserError(f"{where}: its tensor is {kind}, neither float nor uint8; convert it with .float()")
    if not values.dim() or not values.numel():
        raise UserError(f"{where}: its tensor has the shape {list(values.shape)}; it needs at least one value")
    values = values.detach().to("cpu", torch.float32)
    if not values.isfinite().all():
        raise UserError(f"{where}: its tensor holds NaN or infinity; replace such values, or leave the item out")
    return values


def _label(target: Any, where: str) -> int:
    """The target of an item as an integer."""
    try:
        return operator.index(target)
    except (TypeError, ValueError, RuntimeError):
        given = repr(target)[:40]
        raise UserError(
            f"{where}: its target {given} is no integer; targets are the numbers of classes, from 0, or with data.task "
            "= 'regression' or 'multi-label' the numbers or labels that are to be predicted"
        ) from None


def name_classes(labels: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    """Names the K classes that all domains have together: "0" to "K-1", or "1" to "K" where they count from 1.

    labels: {domain: int64 [N]}, of all domains. Raises UserError for other numbers, and for fewer than two classes.
    """
    together = np.concatenate(list(labels.values()))
    numbers = np.unique(together)
    first, last = int(numbers[0]), int(numbers[-1])
    has_gap = last - first + 1 > len(numbers)
    if first in (0, 1) and len(numbers) >= 2 and not has_gap:
        return tuple(map(str, numbers))
    for domain, of_domain in labels.items():
        least = of_domain.min()
        if least < 0:
            raise UserError(f"{domain}: there is the label {least}; labels are 0 to K-1 or 1 to K")
    shown = ", ".join(map(str, numbers[:8]))
    if len(numbers) > 8:
        shown += ", ..."
    reason = "they must be 0 to K-1 or 1 to K without a gap"
    if len(numbers) < 2:
        reason = "at least two classes are needed"
    raise UserError(f"{', '.join(labels)}: the labels are {shown}; {reason}")


def check_labels(labels: np.ndarray, classes: int, name: str) -> None:
    """Raises UserError for labels int64 [N] that are not 0 to `classes` - 1.

    It is for one client alone, whose labels cannot show whether all clients together count from 0 or from 1.
    """
    is_outside = (labels < 0) | (labels >= classes)
    if not is_outside.any():
        return
    hint = "the model has no such class"
    if labels.min() >= 1 and labels.max() == classes:
        hint = "they seem to count from 1: subtract 1 on every client"
    label = labels[is_outside][0]
    raise UserError(f"{name}: there is the label {label}, but {classes} classes are 0 to {classes - 1}; {hint}")
