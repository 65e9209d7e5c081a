"""Calls Flower's own aggregation strategies with tensors; only this module makes and reads the replies that they take.

Flower's message strategies aggregate a list of replies. Our replies were checked before (in reply_checks.py), so this
module passes only tensors, in float64 or in their own type, and returns the new tensors.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Bulyan, FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi

from strategies.parts import ArrayDict, Arrays

Optimizer = FedAvgM | FedAdam | FedYogi | FedAdagrad
WEIGHT = "num-examples"  # the metric by which Flower weighs a reply
LOSS = "train_loss"

__all__ = ["LOSS", "WEIGHT", "Bulyan", "FedAdagrad", "FedAdam", "FedAvgM", "FedYogi", "Optimizer"]


@dataclass(frozen=True)
class Answer:
    """The part of a reply that Flower's aggregation reads; a real Message cannot be made without a node."""

    content: RecordDict

    def has_error(self) -> bool:
        """Only accepted replies come here."""
        return False


class Uncollected(ArrayRecord):
    """A record that is read without the search for garbage that Flower starts after each: 0.14 s, once per client."""

    def to_numpy_ndarrays(self, *, keep_input: bool = True) -> list[np.ndarray]:
        """The tensors; the record is empty afterwards when its input need not be kept."""
        arrays = super().to_numpy_ndarrays()
        if not keep_input:
            self.clear()
        return arrays


def record(arrays: Arrays) -> ArrayRecord:
    """Flower's record of tensors; the shape of every tensor is kept, also that of scalars."""
    tensors = {}
    for name, array in arrays.items():
        tensors[name] = Array(np.asarray(array))
    return Uncollected(tensors)


def answer(arrays: Arrays, metrics: Mapping[str, float]) -> Message:
    """One accepted reply, in the form that Flower's aggregation takes; it reads nothing else of a message."""
    numbers = MetricRecord(dict(metrics))
    content = RecordDict({"arrays": record(arrays), "metrics": numbers})
    return cast(Message, Answer(content))


def aggregate(
    strategy: FedAvg, round: int, states: Sequence[Arrays], metrics: Sequence[Mapping[str, float]]
) -> ArrayDict | None:
    """A strategy's aggregate of the clients' tensors and metrics (with `WEIGHT`); None when it skips the round."""
    replies = [answer(arrays, numbers) for arrays, numbers in zip(states, metrics, strict=True)]
    arrays, _ = strategy.aggregate_train(round, replies)
    if arrays is None:
        return None
    return {name: array.numpy() for name, array in arrays.items()}


def optimizer_step(
    strategy: Optimizer, round: int, start: Arrays, fused: Arrays, memory: Arrays
) -> tuple[ArrayDict, ArrayDict]:
    """One step of a server optimizer from `start` towards `fused`: the new tensors, and its moments after the step.

    memory: `m:NAME` (momentum, first moment) and `v:NAME` (second moment) of every tensor; empty before the first step
    """
    m = _moments(memory, "m", fused)
    v = _moments(memory, "v", fused)
    if isinstance(strategy, FedAvgM):
        strategy.current_arrays = record(start)
        strategy.momentum_vector = list(m.values()) or None
    else:
        strategy.current_arrays = dict(start)
        strategy.m_t = m or None
        strategy.v_t = v or None
    moved = aggregate(strategy, round, [fused], [{WEIGHT: 1}])
    assert moved is not None  # no round without a reply
    if isinstance(strategy, FedAvgM):
        momentum = strategy.momentum_vector or ()
        return moved, _remembered("m", dict(zip(fused, momentum)))
    first = _remembered("m", strategy.m_t or {})
    second = _remembered("v", strategy.v_t or {})
    return moved, first | second


def _moments(memory: Arrays, key: str, names: Collection[str]) -> ArrayDict:
    """One kind of moments (`m` or `v`) by the names of the tensors; those that are remembered."""
    moments = {}
    for name in names:
        if f"{key}:{name}" in memory:
            moments[name] = memory[f"{key}:{name}"]
    return moments


def _remembered(key: str, moments: Arrays) -> ArrayDict:
    """One kind of moments, in the form in which they are remembered."""
    return {f"{key}:{name}": np.asarray(array) for name, array in moments.items()}
