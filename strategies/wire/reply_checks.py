"""Checks of the clients' replies. Only a reply that passes them can change the global model."""

import math
import re
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import TypeVar

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from fedsim.common.errors import USER_ERROR, ClientFailedError, UserError
from fedsim.common.tasks import BY_METRIC, CLASSIFICATION, OF_CLASSES, SOURCE_TEST, TASKS
from fedsim.tensors.arrays import all_finite, record_to_arrays
from fedsim.tensors.records import arrays_of, config_of, configs_of, metrics_of
from strategies.parts import ArrayDict, Arrays, Bank, RefusedUpdateError, ServerRound, Update
from strategies.stored import Heads

MOST_EXAMPLES = 10**9
MOST_STEPS = 2**40  # largest value of a batch-norm counter
MOST_METRICS = 64
LARGEST_METRIC = 1e30  # sums and means of such numbers stay finite
REASON_CHARACTERS = 300
MOST_TRACEBACK = 20_000  # characters of a client's own error text that are shown
METRIC_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
METRICS = (*(task.metric for task in TASKS.values()), *OF_CLASSES)
ERRORS = {task.metric for task in TASKS.values() if not task.is_fraction}
# Columns of clients.csv that only the server writes; a metric of that name would imitate them.
OF_THE_SERVER = {"round", "client", "domain", "status", "examples", "weight", "update_norm", "bytes_down", "bytes_up"}
OF_VALIDATIONS = {f"validation_{name}" for name in (*METRICS, "loss", "examples", "threshold")}
RESERVED = OF_THE_SERVER | OF_VALIDATIONS
STARTS = ("", "local_validation_", "personal_", SOURCE_TEST)  # of a name that ends in the task's primary metric
# Metrics that are fractions, and those that are never negative, as a reply names them.
RATES = {start + metric for start, metric in product(STARTS, METRICS) if metric not in ERRORS}
MEASURES = {"steps", "images", "gradient_count", "learning_rate", "received_loss", "local_validation_loss"}
NONNEGATIVE = MEASURES | {start + metric for start, metric in product(STARTS, ERRORS)}
VALIDATION_LOSSES = {"loss", "personal_loss"}  # of a validation
ROUNDING = 1e-6  # 1 - Dice may be that much below 0
VALIDATION_METRICS = {"num-examples", "loss", "evaluation_seconds"}  # besides the task's primary metric
MEASURED = ("train_loss", "train_seconds")  # metrics of every reply of our own client to a train message
SPENT = ("images", "steps")  # the work of a client, which the order of its round bounds
OPTIONAL = (*SPENT, "compile_seconds", "side_by_side")  # metrics of some replies of our own client
# The process of a site keeps the images of a run and their fingerprint in memory.
RESTART = "put back those of before, and restart the site (stop.sh, start.sh), whose process remembers what it read"
SLACK = 2  # a client may do so many times what its parts plan: a plan may differ a little from round to round
Metrics = Mapping[str, float]  # by name
ECHOED = ("token", "client", "round", "phase")

T = TypeVar("T")


class RejectedReplyError(Exception):
    """A reply is refused; the text says in one line why."""

    def __init__(self, reason: str) -> None:
        super().__init__(one_line(reason))


@dataclass(frozen=True)
class Expected:
    """What the reply to one message must look like.

    client, token, round, phase: those of the message, which the reply repeats
    examples: the number of the client's training examples, as the handshake said; 0 where it is not compared
    shapes: shape and type of each tensor of the record `arrays`
    decode: reads these tensors where they are compressed
    nonnegative: the tensors of the model that count or are variances
    banks: the banks with records in the reply
    views: the round as each of these banks sees it
    metrics: those that every reply has, and those that a server part needs
    columns: the other metrics that a reply may have; None: any, because the client is somebody else's
    order: the work of a round, by the names in SPENT
    metric: the task's primary metric
    select_by: what selects the round (run.select_by)
    tests_sources: whether clients test on examples of their own (data.source_test)
    data: the hash of the data that the client's site had in the handshake; empty in a simulation
    """

    client: str
    token: str
    round: int
    phase: str
    examples: int = 0
    shapes: Heads = field(default_factory=dict)
    decode: Callable[[Arrays], Arrays] | None = None
    nonnegative: Collection[str] = ()
    banks: tuple[Bank, ...] = ()
    views: Mapping[str, ServerRound] = field(default_factory=dict)
    metrics: Collection[str] = MEASURED
    columns: Collection[str] | None = None
    order: Mapping[str, float] = field(default_factory=dict)
    metric: str = CLASSIFICATION.metric
    select_by: str = "primary"
    tests_sources: bool = False
    data: str = ""


Check = Callable[[RecordDict, Expected], T]  # raises RejectedReplyError


def one_line(text: str, most: int = REASON_CHARACTERS) -> str:
    """Text from outside, made safe for logs and CSV files: one printable line of at most `most` characters."""
    start = text[: 4 * most]
    printable = "".join(letter if letter.isprintable() else " " for letter in start)
    line = " ".join(printable.split())
    if len(line) <= most:
        return line
    return f"{line[: most - 3]}..."


@contextmanager
def refusing() -> Iterator[None]:
    """Within this block every exception becomes a refusal of the reply (RejectedReplyError)."""
    try:
        yield
    except RejectedReplyError:
        raise
    except RefusedUpdateError as error:
        raise RejectedReplyError(error.reason) from error
    except Exception as error:
        raise RejectedReplyError(f"it cannot be checked ({type(error).__name__}: {error})") from error


def checked(check: Check[T], content: RecordDict, expected: Expected) -> T:
    """The result of a check. An unexpected exception is a refusal of the reply and does not stop the server."""
    with refusing():
        return check(content, expected)


def check_update(content: RecordDict, expected: Expected) -> Update:
    """The reply of a train message as an Update; raises RejectedReplyError."""
    banks = {bank.name for bank in expected.banks}
    check_records(content, {"arrays", *banks}, {"metrics"}, {"echo", "state"})
    check_echo(content, expected)
    metrics = read_metrics(content)
    examples = check_examples(metrics, expected.examples)
    check_metrics(metrics, expected.metrics)
    check_columns(metrics, expected)
    records: dict[str, Arrays] = {}
    for name, record in arrays_of(content).items():
        records[name] = read_arrays(name, record)
    arrays = records.pop("arrays")
    check_arrays(arrays, expected.shapes)
    if expected.decode:
        arrays = expected.decode(arrays)
        check_finite("arrays", arrays)
    check_nonnegative(arrays, expected.nonnegative)
    for bank in expected.banks:
        view = expected.views[bank.name]
        check_contribution(bank, expected.client, records[bank.name], view)
    entries = stored_entries(content)
    return Update(expected.client, examples, arrays, metrics, records, entries)


def check_validation(content: RecordDict, expected: Expected) -> dict[str, float]:
    """The metrics of an evaluate message's reply as columns of clients.csv; raises RejectedReplyError."""
    check_records(content, set(), {"metrics"}, {"echo"})
    check_echo(content, expected)
    return validation_columns(read_metrics(content), expected)


def validation_columns(metrics: dict[str, float], expected: Expected) -> dict[str, float]:
    """These metrics of a validation as columns of clients.csv; raises RejectedReplyError for wrong names and values."""
    task = BY_METRIC[expected.metric]
    by = expected.select_by
    metric = task.metric
    needed = set(VALIDATION_METRICS)
    if not task.can_be_undefined:
        needed.add(metric)
    optional = {metric, f"personal_{metric}", "personal_loss", *task.further}
    if by in OF_CLASSES:
        optional.add(by)
    if expected.tests_sources:
        optional.add(SOURCE_TEST + metric)
    check_names("metrics", sorted(metrics), sorted(needed), optional)
    examples = check_examples(metrics)
    check_ranges(metrics)
    of_validation = {metric, by, "loss", *task.further}
    columns: dict[str, float] = {}
    for name, value in metrics.items():
        column = f"validation_{name}" if name in of_validation else name
        columns[column] = value
    columns["validation_examples"] = examples
    return columns


def reported_loss(content: RecordDict, expected: Expected) -> float | None:
    """The loss that a client reports for a model, which need not be finite; None when its reply has another fault.

    A model that is not finite makes other numbers of an honest reply not finite as well, such as an error in the unit
    of the task. In this check all such numbers count as 0.
    """
    try:
        check_records(content, set(), {"metrics"}, {"echo"})
        check_echo(content, expected)
        metrics = metrics_of(content)["metrics"]
        finite: dict[str, object] = {}
        for name, value in metrics.items():
            finite[name] = 0.0 if is_beyond(value) else value
        validation_columns(read_numbers(finite), expected)
    except RejectedReplyError:
        return None
    loss = metrics["loss"]
    assert isinstance(loss, int | float)
    return loss


def is_beyond(value: object) -> bool:
    """Whether this is a float that is not finite, or larger in size than every number that counts."""
    return isinstance(value, float) and not abs(value) <= LARGEST_METRIC  # every comparison with NaN is false


def check_collected(content: RecordDict, expected: Expected) -> Arrays:
    """The contribution to the one bank that a collect message asks for; raises RejectedReplyError."""
    (bank,) = expected.banks
    check_records(content, {bank.name}, set(), {"echo"})
    check_echo(content, expected)
    arrays = read_arrays(bank.name, arrays_of(content)[bank.name])
    check_contribution(bank, expected.client, arrays, expected.views[bank.name])
    return arrays


def check_records(content: RecordDict, arrays: set[str], metrics: set[str], configs: set[str]) -> None:
    """Raises unless these are exactly the records of these names and kinds; only `state` may be missing."""
    check_names_of_records("array", arrays_of(content), arrays)
    check_names_of_records("metric", metrics_of(content), metrics)
    check_names_of_records("config", configs_of(content), configs)


def check_names_of_records(kind: str, records: Mapping[str, object], names: set[str]) -> None:
    """Raises unless the records of one kind have exactly these names; only `state` may be missing."""
    needed = sorted(names - {"state"})
    check_names(f"{kind} records", sorted(records), needed, names)


def check_names(what: str, present: Collection[str], needed: Collection[str], optional: Collection[str] = ()) -> None:
    """Raises unless the names are those that are needed, and perhaps optional ones."""
    missing = [name for name in needed if name not in present]
    extra = []
    for name in present:
        if name not in needed and name not in optional:
            extra.append(name)
    if missing or extra:
        lacks = f"missing {what} {missing[:3]}"
        has = f"unexpected {what} {extra[:3]}"
        raise RejectedReplyError(f"{lacks}, {has}")


def check_echo(content: RecordDict, expected: Expected) -> None:
    """Raises unless the reply repeats token, client, round and phase, and the site's data are as in the handshake."""
    echo = config_of(content, "echo")
    for key in ECHOED:
        value = echo.get(key)
        want = getattr(expected, key)
        if type(value) is not type(want) or value != want:
            difference = f"{key} is {reprlib.repr(value)}, expected {want!r}"
            raise RejectedReplyError(f"it answers another message: {difference}")
    data = echo.get("data", expected.data)
    if expected.data and data != expected.data:
        raise RejectedReplyError(f"the images or labels of its site have changed since the run began; {RESTART}")


def stored_entries(content: RecordDict) -> int:
    """The number of entries of client state that were stored with this reply, as the client says; 0 for none."""
    state = configs_of(content).get("state")
    if state is None:
        return 0
    entries = state.get("entries")
    if type(entries) is not int or not 0 <= entries <= MOST_EXAMPLES:
        raise RejectedReplyError(f"state entries are {reprlib.repr(entries)}, not a count")
    return entries


def read_metrics(content: RecordDict) -> dict[str, float]:
    """The record 'metrics' as finite numbers of a plausible size."""
    record = metrics_of(content)["metrics"]
    if not isinstance(record, MetricRecord) or len(record) > MOST_METRICS:
        raise RejectedReplyError(f"the record 'metrics' holds more than {MOST_METRICS} metrics")
    return read_numbers(record)


def read_numbers(record: Mapping[str, object]) -> dict[str, float]:
    """These metrics; raises RejectedReplyError unless each is a finite number of a plausible size."""
    metrics: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise unfit_metric(name, value, "is not a finite number")
        if isinstance(value, float) and not math.isfinite(value):
            raise unfit_metric(name, value, "is not a finite number")
        if abs(value) > LARGEST_METRIC:
            raise unfit_metric(name, value, f"is larger than {LARGEST_METRIC:g} in size")
        metrics[name] = value
    return metrics


def unfit_metric(name: str, value: object, fault: str) -> RejectedReplyError:
    """The refusal of a metric, whose text says what is wrong and shows the value."""
    shown = reprlib.repr(value)
    return RejectedReplyError(f"metric {name!r} {fault}: {shown}")


def check_metrics(metrics: Metrics, needed: Collection[str]) -> None:
    """Raises unless the needed metrics are there and the method's own have plain names that imitate no other column."""
    missing = sorted(needed - metrics.keys())
    if missing:
        raise RejectedReplyError(f"missing metrics {missing[:3]}")
    for name in metrics:
        is_reserved = name in RESERVED or name.startswith("bytes_")
        if is_reserved or not METRIC_NAME.fullmatch(name):
            raise RejectedReplyError(f"a metric may not be called {reprlib.repr(name)}")
    check_ranges(metrics)


def check_columns(metrics: Metrics, expected: Expected) -> None:
    """Raises for a metric that no part of the recipe reports, and for more work than the order of the round says."""
    columns = expected.columns
    if columns is not None:
        check_names("metrics", sorted(metrics), (), {*expected.metrics, *columns})
    for name in SPENT:
        value = metrics.get(name, 0)
        order = expected.order.get(name)
        is_integer = float(value).is_integer()
        if columns is not None and not is_integer:
            raise RejectedReplyError(f"{name} is {value!r}, not a whole number")
        if order is not None and value > SLACK * order:
            raise RejectedReplyError(f"{name} is {value:g}, more than twice the {order:g} of the order")


def check_ranges(metrics: Metrics) -> None:
    """Raises for a fraction outside of 0 to 1, and for a negative time, count, error or loss of a validation."""
    for name, value in metrics.items():
        if name in RATES and not 0 <= value <= 1:
            raise RejectedReplyError(f"{name} is {value!r}, not between 0 and 1")
        if name in VALIDATION_LOSSES:
            is_negative = value < -ROUNDING
        elif name in NONNEGATIVE or name.endswith("_seconds"):
            is_negative = value < 0
        else:
            continue
        if is_negative:
            raise RejectedReplyError(f"{name} is {value!r}, and may not be negative")


def check_examples(metrics: dict[str, float], expected: int = 0) -> int:
    """Removes the count 'num-examples' from the metrics; it must be that of the handshake when one is expected."""
    examples = metrics.pop("num-examples", None)
    if type(examples) is not int or not 0 < examples <= MOST_EXAMPLES:
        expectation = f", the handshake said {expected}" if expected else ""
        raise RejectedReplyError(f"num-examples is {examples!r}, not a positive integer{expectation}")
    if expected and examples != expected:
        raise RejectedReplyError(f"num-examples is {examples}, the handshake said {expected}")
    return examples


def read_arrays(name: str, record: ArrayRecord) -> ArrayDict:
    """The arrays of one record, which are never unpickled."""
    try:
        return record_to_arrays(record)
    except Exception as error:  # truncated bytes, another serialization, object dtype: all are failures of the client
        raise RejectedReplyError(f"record {name!r} cannot be read: {error}") from None


def check_arrays(arrays: Arrays, shapes: Heads) -> None:
    """Raises unless keys, shapes and dtypes are as expected and all values are finite."""
    check_names("tensors", arrays, shapes)
    for name, (shape, dtype) in shapes.items():
        array = arrays[name]
        if array.shape != shape or array.dtype != dtype:
            form = f"{array.dtype}{list(array.shape)}"
            expectation = f"{dtype}{list(shape)}"
            raise RejectedReplyError(f"tensor {name!r} is {form}, expected {expectation}")
    check_finite("arrays", arrays)


def check_nonnegative(arrays: Arrays, names: Collection[str]) -> None:
    """Refuses negative variances, layers that mostly have no variance, and negative or absurd counters."""
    for name in names:
        array = arrays.get(name)
        if array is None or not array.size:
            continue
        is_negative = (array < 0).any()
        is_absurd = array.dtype.kind in "iu" and array.max() > MOST_STEPS
        if is_negative or is_absurd:
            raise RejectedReplyError(f"tensor {name!r} has a negative value, or a count that is too large to be true")
        # After a thousand steps this happens to single channels that are always zero, but not to half a layer.
        if array.dtype.kind == "f":
            zeros = np.count_nonzero(array == 0)
            if 2 * zeros > array.size:
                raise RejectedReplyError(f"tensor {name!r} has no variance in most channels")


def check_contribution(bank: Bank, client: str, arrays: Arrays, server: ServerRound) -> None:
    """Checks that values are finite, and what the bank itself requires."""
    check_finite(bank.name, arrays)
    reason = bank.accept(client, arrays, server)
    if reason:
        raise RejectedReplyError(f"{bank.name}: {reason}")


def check_finite(record: str, arrays: Arrays) -> None:
    """Raises for NaN and infinite values."""
    for name, array in arrays.items():
        if not all_finite(array):
            raise RejectedReplyError(f"tensor {name!r} of record {record!r} has NaN or infinite values")


def failure_reason(reply: Message) -> str:
    """Code and last line of a failed reply's error, for records; the full text is in `reply.error.reason`."""
    text = str(reply.error.reason)[-100_000:]
    lines = [line for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else "without a reason"
    return one_line(f"error {reply.error.code}: {last}")


def client_failure(client: str, round: int, reason: str, traceback: str) -> UserError | ClientFailedError:
    """The error that ends a run when a client fails: one line if the user can correct it, else the traceback."""
    if USER_ERROR in traceback:
        _, message = traceback.split(USER_ERROR, 1)
        return UserError(f"client {client}: {one_line(message, MOST_TRACEBACK)}")
    failure = f"client {client!r} failed in round {round}: {reason}"
    if traceback:
        text = traceback[-MOST_TRACEBACK:]
        failure += f"\n{text.rstrip()}"
    return ClientFailedError(failure)
