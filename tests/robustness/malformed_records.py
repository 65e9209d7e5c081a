"""More ways in which a reply can be wrong: its records, its numbers, and what it says that it answers."""

import random
from typing import Any

from flwr.app import Error
from malformed import ALL, Draft, mutation

# --- records ------------------------------------------------------------------------------------------------------


@mutation(*ALL)
def missing_record(draft: Draft, rng: random.Random, odd: Any) -> bool:
    """A record that must be there is not, or has another name."""
    tables = [
        (table, name)
        for table in (draft.arrays, draft.metrics, draft.configs)
        for name in table
        if name != "state"  # without it a client keeps nothing
    ]
    table, name = rng.choice(tables)
    record = table.pop(name)
    if rng.random() < 0.5:
        table[f"{name}{odd!s}x"] = record
    return True


@mutation(*ALL)
def extra_record(draft: Draft, rng: random.Random, odd: Any) -> bool:
    """A record that nobody asked for."""
    table = rng.choice([draft.arrays, draft.metrics, draft.configs])
    table[f"extra {odd!s}"] = {}
    return True


@mutation(*ALL)
def wrong_kind(draft: Draft, rng: random.Random, odd: Any) -> bool:
    """A record of the right name and the wrong kind, or no record at all."""
    tables = [draft.arrays, draft.metrics, draft.configs]
    table, name = rng.choice([(table, name) for table in tables for name in table if name != "state"])
    entries = table.pop(name)
    if rng.random() < 0.3:
        draft.others[name] = odd
    else:
        rng.choice([other for other in tables if other is not table])[name] = entries
    return True


# --- numbers ------------------------------------------------------------------------------------------------------


@mutation("train", "evaluate")
def wrong_count(draft: Draft, rng: random.Random, odd: Any) -> bool:
    """A number of examples that is not a valid number."""
    wrong = [0, -1, -5, True, False, 1.0, 80.5, 10**10, 10**12, 2**70, float("nan"), float("inf"), [3], "3", None, odd]
    value = rng.choice(wrong)
    if type(value) is int and 0 < value <= 10**9:
        return False
    draft.metrics["metrics"]["num-examples"] = value
    return True


@mutation("train")
def another_count(draft: Draft, rng: random.Random, odd: Any) -> bool:
    """A number of examples that differs from the one in the handshake."""
    draft.metrics["metrics"]["num-examples"] += rng.choice([1, -1, 7, 10**6])
    return True


@mutation("train", "evaluate")
def wrong_metric(draft: Draft, rng: random.Random, odd: Any) -> bool:
    """A metric that is not a finite number of plausible size."""
    metrics = draft.metrics["metrics"]
    wrong = [float("nan"), float("inf"), -float("inf"), 1e31, -1e300, 10**400, True, None, "0.5", [0.5], [], 1j, b"1"]
    if not isinstance(odd, int | float):
        wrong.append(odd)
    metrics[rng.choice([name for name in metrics if name != "num-examples"])] = rng.choice(wrong)
    return True


@mutation("train", "evaluate")
def missing_metric(draft: Draft, rng: random.Random, odd: Any) -> bool:
    """A metric that the server needs is not there."""
    metrics = draft.metrics["metrics"]
    needed = {
        "num-examples",
        "train_loss",
        "train_seconds",
        "gap",
        "gap_valid",
        "accuracy",
        "loss",
        "evaluation_seconds",
    }
    del metrics[rng.choice([name for name in metrics if name in needed])]
    return True


@mutation("train", "evaluate")
def forged_column(draft: Draft, rng: random.Random, odd: Any) -> bool:
    """A metric with the name of a column that only the server writes, or with no name at all."""
    forged = ["status", "client", "round", "domain", "examples", "weight", "bytes_up", "bytes_down_arrays"]
    forged += ["validation_accuracy", "validation_examples", "a,b", 'x"\n', "", "Gap", "x" * 1000, f" {odd!s}"]
    draft.metrics["metrics"][rng.choice(forged)] = rng.random()
    return True


@mutation("train", "evaluate")
def too_many_metrics(draft: Draft, rng: random.Random, odd: Any) -> bool:
    """A thousand columns."""
    draft.metrics["metrics"].update({f"metric_{number}": 1.0 for number in range(1000)})
    return True


@mutation("evaluate")
def impossible_accuracy(draft: Draft, rng: random.Random, odd: Any) -> bool:
    """An accuracy above one or below zero."""
    name = rng.choice(["accuracy", "personal_accuracy"])
    draft.metrics["metrics"][name] = rng.choice([1.0000001, 2, 100.0, -1e-9, -1])
    return True


@mutation("train")
def wrong_state(draft: Draft, rng: random.Random, odd: Any) -> bool:
    """A number of stored entries that is not a valid number."""
    value = rng.choice([-1, 1.5, True, None, "1", [1], 2**70, odd])
    if type(value) is int and 0 <= value <= 10**9:
        return False
    draft.configs["state"] = {"entries": value}
    return True


# --- identity -----------------------------------------------------------------------------------------------------


@mutation(*ALL)
def wrong_echo(draft: Draft, rng: random.Random, odd: Any) -> bool:
    """An answer to another round, run, client or phase, or of another type."""
    echo = draft.configs["echo"]
    key = rng.choice(["token", "client", "round", "phase"])
    right = echo[key]
    wrong = rng.choice(
        ["rot0", "rot15", "0" * 16, 1, 7, -1, "train", "evaluate", "", None, True, 2.0, b"train", [right], odd]
    )
    if type(wrong) is type(right) and wrong == right:
        return False
    echo[key] = wrong
    if rng.random() < 0.2:
        del echo[key]
    return True


@mutation(*ALL)
def error_reply(draft: Draft, rng: random.Random, odd: Any) -> bool:
    """A client that failed, and what it says about it."""
    text = rng.choice(
        [
            "Traceback\n  line\nRuntimeError: out of memory",
            "",
            "\n\n \n",
            f"{odd!s}",
            "user error: no data",
            "ok",
            "x" * 9999,
        ]
    )
    draft.error = Error(rng.choice([0, 1, 2, 999]), text)
    return True
