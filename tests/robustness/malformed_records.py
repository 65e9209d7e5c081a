"""More ways in which a reply can be wrong: its records, its numbers, and what it says that it answers."""

from flwr.app import Error
from malformed import ALL, mutation


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
