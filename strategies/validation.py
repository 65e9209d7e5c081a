"""A reply touches the global model only after it was checked; what is wrong is said in one line."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import Message, MetricRecord, RecordDict

from fedsim.arrays import all_finite, record_to_arrays
from strategies.parts import Update


class RejectedReplyError(Exception):
    """Why a reply is refused, in one line."""


@dataclass(frozen=True)
class Expected:
    """What the reply to one message must look like."""

    client: str
    token: str
    round: int
    phase: str
    examples: int | None
    shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]]


def manifest(arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype of every tensor by name."""
    return {name: (array.shape, array.dtype) for name, array in arrays.items()}


def check_update(content: RecordDict, expected: Expected) -> Update:
    """The reply of a train message as an Update; raises RejectedReplyError."""
    check_echo(content, expected)
    metrics = read_metrics(content)
    examples = check_examples(metrics, expected)
    records = {name: read_arrays(name, record) for name, record in content.array_records.items()}
    if "arrays" not in records:
        raise RejectedReplyError("the record 'arrays' is missing")
    arrays = records.pop("arrays")
    check_arrays(arrays, expected.shapes)
    for name, extra in records.items():
        check_finite(name, extra)
    return Update(expected.client, examples, arrays, metrics, records)


def check_echo(content: RecordDict, expected: Expected) -> None:
    """The reply names the run, client, round and phase of the message that it answers."""
    echo = content.config_records.get("echo")
    if echo is None:
        raise RejectedReplyError("the record 'echo' is missing")
    for key, want in (
        ("token", expected.token),
        ("client", expected.client),
        ("round", expected.round),
        ("phase", expected.phase),
    ):
        if echo.get(key) != want:
            raise RejectedReplyError(f"it answers another message: {key} is {echo.get(key)!r}, expected {want!r}")


def read_metrics(content: RecordDict) -> dict[str, float]:
    """The record 'metrics' as finite numbers."""
    record = content.metric_records.get("metrics")
    if not isinstance(record, MetricRecord):
        raise RejectedReplyError("the record 'metrics' is missing")
    metrics = dict(record)
    for name, value in metrics.items():
        if isinstance(value, list) or not math.isfinite(value):
            raise RejectedReplyError(f"metric {name!r} is not a finite number: {value!r}")
    return metrics


def check_examples(metrics: dict[str, float], expected: Expected) -> int:
    """Takes 'num-examples' out of the metrics; it must be the count of the handshake."""
    examples = metrics.pop("num-examples", None)
    if not isinstance(examples, int) or isinstance(examples, bool) or examples <= 0:
        raise RejectedReplyError(f"num-examples is {examples!r}, not a positive integer")
    if expected.examples is not None and examples != expected.examples:
        raise RejectedReplyError(f"num-examples is {examples}, the handshake said {expected.examples}")
    return examples


def read_arrays(name: str, record: Mapping) -> dict[str, np.ndarray]:
    """Arrays of one record, without ever unpickling."""
    try:
        return record_to_arrays(record)
    except Exception as error:  # truncated bytes, foreign serialisation, object dtype: all are the client's fault
        raise RejectedReplyError(f"record {name!r} cannot be read: {error}") from None


def check_arrays(arrays: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> None:
    """Same keys, shapes and dtypes as expected, all values finite, no negative variance or counter."""
    missing = [name for name in shapes if name not in arrays]
    extra = [name for name in arrays if name not in shapes]
    if missing or extra:
        raise RejectedReplyError(f"missing tensors {missing[:3]}, unexpected tensors {extra[:3]}")
    for name, (shape, dtype) in shapes.items():
        array = arrays[name]
        if array.shape != shape or array.dtype != dtype:
            raise RejectedReplyError(
                f"tensor {name!r} is {array.dtype}{list(array.shape)}, expected {dtype}{list(shape)}"
            )
    check_finite("arrays", arrays)


def check_finite(record: str, arrays: Mapping[str, np.ndarray]) -> None:
    """No NaN and no infinity."""
    for name, array in arrays.items():
        if not all_finite(array):
            raise RejectedReplyError(f"tensor {name!r} of record {record!r} has NaN or infinite values")


def failure_reason(reply: Message) -> str:
    """First line of a failed reply's error, for records; the full text is in `reply.error.reason`."""
    lines = [line for line in str(reply.error.reason).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"error code {reply.error.code}"
