"""Calls Flower's own aggregation strategies with tensors; only this module makes and reads the replies that they take.

Flower's message strategies aggregate a list of replies. Our replies were checked before (in reply_checks.py), so this
module passes only tensors, in float64 or in their own type, and returns the new tensors.
"""

from collections.abc import Mapping, Sequence
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
    return Uncollected({name: Array(np.asarray(array)) for name, array in arrays.items()})


def answer(arrays: Arrays, metrics: Mapping[str, float]) -> Message:
    """One accepted reply, in the form that Flower's aggregation takes; it reads nothing else of a message."""
    return cast(Message, Answer(RecordDict({"arrays": record(arrays), "metrics": MetricRecord(dict(metrics))})))


def aggregate(
    strategy: FedAvg, round: int, states: Sequence[Arrays], metrics: Sequence[Mapping[str, float]]
) -> ArrayDict | None:
    """A strategy's aggregate of the clients' tensors and metrics (with `WEIGHT`); None when it skips the round."""
    replies = [answer(arrays, numbers) for arrays, numbers in zip(states, metrics, strict=True)]
    arrays, _ = strategy.aggregate_train(round, replies)
    return None if arrays is None else {name: array.numpy() for name, array in arrays.items()}


def optimizer_step(
    strategy: Optimizer, round: int, start: Arrays, fused: Arrays, memory: Arrays
) -> tuple[ArrayDict, ArrayDict]:
    """One step of a server optimizer from `start` towards `fused`: the new tensors, and its moments after the step.

    memory: `m:NAME` (momentum, first moment) and `v:NAME` (second moment) of every tensor; empty before the first step
    """
    m = {name: memory[f"m:{name}"] for name in fused if f"m:{name}" in memory} or None
    v = {name: memory[f"v:{name}"] for name in fused if f"v:{name}" in memory} or None
    if isinstance(strategy, FedAvgM):
        strategy.current_arrays, strategy.momentum_vector = record(start), list(m.values()) if m else None
    else:
        strategy.current_arrays, strategy.m_t, strategy.v_t = dict(start), m, v
    moved = aggregate(strategy, round, [fused], [{WEIGHT: 1}])
    assert moved is not None  # no round without a reply
    if isinstance(strategy, FedAvgM):
        return moved, {f"m:{name}": np.asarray(array) for name, array in zip(fused, strategy.momentum_vector or ())}
    moments = (("m", strategy.m_t or {}), ("v", strategy.v_t or {}))
    return moved, {f"{key}:{name}": np.asarray(array) for key, moment in moments for name, array in moment.items()}
