"""Ways in which a reply can be wrong. A mutation changes a draft of a good reply; it returns False if it cannot."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from fedsim.tensors.arrays import NUMPY_STYPE, record_to_arrays

Mutation = Callable[["Draft", random.Random, Any], bool | None]
ALL = ("train", "evaluate", "collect")
LETTERS = "aB0 '\"\n\r\t\0\x1b[2J\x7f\x85\u2028\u202eé漢\U0001f600\U000781c3{}%\\,;:/"
MUTATIONS: dict[str, tuple[Mutation, tuple[str, ...]]] = {}


@dataclass
class Draft:
    """A reply's records as plain tables, so that they can be changed in every way in which a message can be wrong."""

    arrays: dict[str, dict[str, Any]]
    metrics: dict[str, dict[str, Any]]
    configs: dict[str, dict[str, Any]]
    others: dict[str, Any]
    error: Error | None = None

    @classmethod
    def of(cls, reply: Message) -> "Draft":
        content = reply.content
        tables = (content.array_records, content.metric_records, content.config_records)
        return cls(*({name: dict(record) for name, record in table.items()} for table in tables), {})

    def reply(self, message: Message) -> Message:
        """The reply to a message, made without the checks of Flower's constructors on the sender's side."""
        if self.error:
            return Message(self.error, reply_to=message)
        content = RecordDict()
        for kind, table in zip((ArrayRecord, MetricRecord, ConfigRecord), self.tables()):
            for name, entries in table.items():
                record = kind()
                record.__dict__["_data"].update(entries)
                content.__dict__["_data"][name] = record
        content.__dict__["_data"].update(self.others)
        return Message(content, reply_to=message)

    def tables(self) -> list[dict[str, dict[str, Any]]]:
        return [self.arrays, self.metrics, self.configs]

    def pick_record(self, rng: random.Random) -> tuple[dict[str, dict[str, Any]], str]:
        """A table and the name of one record; without `state` a client keeps nothing, which is no fault."""
        return rng.choice([(table, name) for table in self.tables() for name in table if name != "state"])


def odd_value(rng: random.Random) -> Any:
    text = "".join(rng.choice(LETTERS) for _ in range(rng.randrange(20)))
    number = rng.choice([rng.uniform(-1e9, 1e9), 0.0, -0.0, 1e308, float("nan"), float("inf")])
    return rng.choice([text, text, number, rng.randrange(-(2**80), 2**80), True, None, rng.randbytes(8), [number]])


def broken(mutate: Mutation, reply: Message, message: Message, rng: random.Random) -> Message | None:
    """A copy of a good reply that is wrong in one way; None if it cannot be wrong in this way."""
    for _ in range(20):
        draft = Draft.of(reply)
        if mutate(draft, rng, odd_value(rng)) is not False:
            return draft.reply(message)
    return None


def mutation(*phases: str) -> Callable[[Mutation], Mutation]:
    def register(function: Mutation) -> Mutation:
        MUTATIONS[function.__name__] = (function, phases)
        return function

    return register


def of_tensor(*phases: str, kinds: str = "fiu", name: str = "", named: Callable = lambda name: True) -> Callable:
    """Register a function of one tensor (a copy), its record, rng and odd; it returns what replaces the tensor."""

    def register(function: Callable) -> None:
        def mutate(draft: Draft, rng: random.Random, odd: Any) -> bool:
            found = [
                (entries, record, key, array)
                for record, entries in draft.arrays.items()
                for key, array in record_to_arrays(entries).items()
                if array.dtype.kind in kinds and array.size and named(key)
            ]
            entries, record, key, array = rng.choice(found) if found else ({}, "", "", None)
            changed = function(np.array(array), record, rng, odd) if found else None
            entries[key] = Array(changed) if isinstance(changed, np.ndarray) else changed
            return changed is not None

        MUTATIONS[name or function.__name__] = (mutate, phases)

    return register


def with_one(array: np.ndarray, rng: random.Random, *values: float) -> np.ndarray:
    array.reshape(-1)[rng.randrange(array.size)] = rng.choice(values)
    return array


of_tensor("train", "collect", kinds="f", name="not_finite")(
    lambda array, record, rng, odd: with_one(array, rng, np.nan, np.inf, -np.inf)
)


@of_tensor("train", "collect")
def wrong_shape(array, record, rng, odd):
    """One axis more, only one axis, one number less, a scalar instead of a vector, or a vector instead of a scalar."""
    flat = array.reshape(-1)
    changed = np.asarray(rng.choice([array[None], flat, flat[1:], flat[0], array[..., None]]))
    if changed.shape == array.shape or (record != "arrays" and changed.ndim == array.ndim):
        return None  # a bank does not know how many styles a client has
    return changed


@of_tensor("train", "collect")
def wrong_dtype(array, record, rng, odd):
    dtype = np.dtype(rng.choice(["f8", "f2", "c8", "i4", "u1", "?", ">f4", ">i8"]))
    return None if dtype == array.dtype else array.astype(dtype)


@of_tensor("train", "collect")
def damaged_bytes(array, record, rng, odd):
    data = Array(array).data
    cut, more = rng.randrange(len(data)), bytes(1 + rng.randrange(9))
    damaged = rng.choice([data[:cut], data + more, rng.randbytes(len(data)), b"", data[cut + 1 :]])
    return Array(str(array.dtype), array.shape, NUMPY_STYPE, damaged)


@of_tensor("train", "collect")
def lying_declaration(array, record, rng, odd):
    """What is declared about a tensor does not agree with its bytes, or is not a tensor."""
    fake = Array(str(array.dtype), array.shape, NUMPY_STYPE, Array(array).data)
    lies = {
        "shape": [(*array.shape, 2), (10**12,), (-1, 4), (2**70,), ("x",), None, 3],
        "dtype": ["float99", "", "object", "O", "V8", "f8", "'", None, 7],
        "stype": ["pickle", "", "torch.tensor", None], "data": ["text", None, 12],
    }  # fmt: skip
    about = rng.choice([*lies, "all"])
    if about == "all":
        return odd
    setattr(fake, about, rng.choice(lies[about]))
    return fake


@of_tensor("train", "collect")
def hostile_header(array, record, rng, odd):
    """A header that announces terabytes, has nested brackets, or is not a dictionary."""
    shape = rng.choice([(10**13,), (0, 10**30), (2**63,), (-5,), array.shape])
    header = "{{'descr': {}, 'fortran_order': False, 'shape': {}, }}".format
    texts = [header(f"'{array.dtype.str}'", shape), header("'|V0'", shape), header([("a", "<f4"), ("b", "|O")], (1,))]
    texts += ["(" * 9000, "__import__('os').getpid()", repr(odd)]
    text = rng.choice(texts).encode("utf-8", "replace")[:60_000]
    data = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(rng.randrange(64))
    return Array(str(array.dtype), shape, NUMPY_STYPE, data)


of_tensor("train", named=lambda name: name.endswith("running_var"), name="negative_variance")(
    lambda array, record, rng, odd: with_one(array, rng, -1e-3, -1e30)
)
of_tensor("train", named=lambda name: name.endswith("num_batches_tracked"), name="impossible_counter")(
    lambda array, record, rng, odd: with_one(array, rng, -1, -(2**62), 2**62, 2**63 - 1)
)


@of_tensor("collect", named=lambda name: name in ("std", "amplitude"))
def impossible_contribution(array, record, rng, odd):
    array = with_one(array, rng, -rng.random() - 1e-6)
    return array[:0] if rng.random() < 0.3 else array


@mutation("train", "collect")
def names(draft, rng, odd):
    """A tensor missing, one too many, one under another name, or none."""
    entries = draft.arrays[rng.choice([record for record, entries in draft.arrays.items() if entries])]
    name, change = rng.choice(list(entries)), rng.choice(["drop", "add", "rename", "empty"])
    kept = entries[name] if change == "add" else entries.pop(name)
    if change in ("add", "rename"):
        entries[f"{odd!s}'{rng.random()}"] = kept
    if change == "empty":
        entries.clear()


@mutation(*ALL)
def missing_record(draft, rng, odd):
    table, name = draft.pick_record(rng)
    record = table.pop(name)
    if rng.random() < 0.5:
        table[f"{name}{odd!s}x"] = record


@mutation(*ALL)
def extra_record(draft, rng, odd):
    rng.choice(draft.tables())[f"extra {odd!s}"] = {}


@mutation(*ALL)
def wrong_kind(draft, rng, odd):
    table, name = draft.pick_record(rng)
    entries = table.pop(name)
    if rng.random() < 0.3:
        draft.others[name] = odd
    else:
        rng.choice([other for other in draft.tables() if other is not table])[name] = entries


@mutation("train", "evaluate")
def wrong_count(draft, rng, odd):
    wrong = [0, -1, -5, True, False, 1.0, 80.5, 10**10, 10**12, 2**70, float("nan"), float("inf"), [3], "3", None, odd]
    draft.metrics["metrics"]["num-examples"] = value = rng.choice(wrong)
    return not (type(value) is int and 0 < value <= 10**9)


@mutation("train")
def another_count(draft, rng, odd):
    draft.metrics["metrics"]["num-examples"] += rng.choice([1, -1, 7, 10**6])


@mutation("train", "evaluate")
def wrong_metric(draft, rng, odd):
    metrics = draft.metrics["metrics"]
    wrong = [float("nan"), float("inf"), -float("inf"), 1e31, -1e300, 10**400, True, None, "0.5", [0.5], [], 1j, b"1"]
    wrong += [] if isinstance(odd, int | float) else [odd]
    metrics[rng.choice([name for name in metrics if name != "num-examples"])] = rng.choice(wrong)


NEEDED = {"num-examples", "train_loss", "train_seconds", "gap", "gap_valid", "accuracy", "loss", "evaluation_seconds"}


@mutation("train", "evaluate")
def missing_metric(draft, rng, odd):
    metrics = draft.metrics["metrics"]
    del metrics[rng.choice([name for name in metrics if name in NEEDED])]


@mutation("train", "evaluate")
def forged_column(draft, rng, odd):
    """A metric with the name of a column that only the server writes, or with no name at all; a thousand columns."""
    forged = ["status", "client", "round", "domain", "examples", "weight", "bytes_up", "bytes_down_arrays"]
    forged += ["validation_accuracy", "validation_examples", "a,b", 'x"\n', "", "Gap", "x" * 1000, f" {odd!s}"]
    many = {f"metric_{number}": 1.0 for number in range(1000)}
    draft.metrics["metrics"].update(many if rng.random() < 0.1 else {rng.choice(forged): rng.random()})


@mutation("evaluate")
def impossible_accuracy(draft, rng, odd):
    name = rng.choice(["accuracy", "personal_accuracy"])
    draft.metrics["metrics"][name] = rng.choice([1.0000001, 2, 100.0, -1e-9, -1])


@mutation("train")
def wrong_state(draft, rng, odd):
    value = rng.choice([-1, 1.5, True, None, "1", [1], 2**70, odd])
    draft.configs["state"] = {"entries": value}
    return not (type(value) is int and 0 <= value <= 10**9)


@mutation(*ALL)
def wrong_echo(draft, rng, odd):
    """An answer to another round, run, client or phase, or of another type."""
    echo = draft.configs["echo"]
    key = rng.choice(["token", "client", "round", "phase"])
    right, numbers = echo.pop(key), [1, 7, -1, 2.0, True]
    wrong = rng.choice(["rot0", "rot15", "0" * 16, "train", "evaluate", "", None, b"train", [right], odd, *numbers])
    if rng.random() < 0.8:
        echo[key] = wrong
    return not (key in echo and type(wrong) is type(right) and wrong == right)


@mutation(*ALL)
def error_reply(draft, rng, odd):
    """A client that failed, and what it says about it."""
    texts = ["Traceback\n  line\nRuntimeError: out of memory", "", "\n\n \n", "user error: no data", "ok", "x" * 9999]
    draft.error = Error(rng.choice([0, 1, 2, 999]), rng.choice([*texts, f"{odd!s}"]))
