"""A bound on the size of an update, because finite values alone do not make an update acceptable.

The size of an update is the L2 norm of (reply - global model) over all its floating-point tensors. The squares are
summed in float64, so that even 3e38 in every weight has a finite size. A reply of client k is refused in round t when

    ||theta_k^t - theta^(t-1)||  >  limit * r_k

where r_k is the upper median of the sizes of the other replies in this round. Without other replies r_k is the lower
median of the client's own earlier sizes, and in its very first round ||theta^(t-1)||. The reason also says how the size
compares with the client's own history.

The upper median of an even number of sizes is the larger of the two in the middle. Let f clients of n >= 2 f + 1 (1 of
3, 2 of 5, 3 of 7) send sizes of their choice. With the upper median they cannot have an honest client refused by sizes
near zero, and they cannot raise their own bound above the largest size of an honest client. With the lower median, one
of three could do the former. Two that collude of three can do both. Of two clients, each is the other's only measure:
both are refused, so that neither wins by a lie and the round is void. A client's own history is written by this client
alone, so that the median does not protect it; the lower one is the stricter bound.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, MutableMapping, Sequence

import numpy as np

from fedsim.settings import RunSettings
from strategies.parts import Arrays

KEPT_SIZES = 20  # sizes of each client that are kept as its history
MOST_HISTORIES = 200  # clients that have a history; with more clients, a round seldom has only one
STANDS_OUT = 3.0  # an update is named when it is this many times as large as the others'
RUINED = 10.0  # a loss that is this many times the lowest of its site, and of 1, is that of a ruined model
FIRST_LOSS = 10.0  # stands for the lowest loss of a site that has not validated yet: no model is trained then
Sizes = Mapping[str, float]  # by client, or by the name of a metric
Reasons = dict[str, str]  # why a client is refused, by client
BLOCK = 1 << 15  # values that are subtracted and converted at a time, so that they stay in the processor's cache


def update_size(arrays: Arrays, previous: Arrays) -> float:
    """L2 norm of the difference over the floating-point tensors of `arrays`; infinite when it is beyond float64."""
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for name, array in arrays.items():
            if array.dtype.kind == "f":
                total += squared_distance(array, previous.get(name))
    if not math.isfinite(total):
        return math.inf
    return math.sqrt(total)


def squared_distance(array: np.ndarray, other: np.ndarray | None) -> float:
    """The sum of squared differences, added up in float64; without another array, of the array itself.

    Two float32 arrays are subtracted in float32, which is exact to 6e-8 of each difference and twice as fast; where
    that overflows, in float64.
    """
    flat = np.asarray(array).reshape(-1)
    base = None if other is None else np.asarray(other).reshape(-1)
    single = base is not None and flat.dtype == base.dtype == np.float32
    total = 0.0
    for start in range(0, flat.size, BLOCK):
        block = slice(start, start + BLOCK)
        values = flat[block]
        others = None if base is None else base[block]
        square = _square(values, others, np.float32) if single else math.inf
        if not math.isfinite(square):
            square = _square(values, others, np.float64)
        total += square
    return total


def _square(values: np.ndarray, others: np.ndarray | None, dtype: type[np.floating]) -> float:
    difference = values
    if others is not None:
        difference = np.subtract(values, others, dtype=dtype)
    double = difference.astype(np.float64, copy=False)
    return float(double @ double)


def lower_median(sizes: Sequence[float]) -> float:
    """The value in the middle; of an even number of values, the smaller of the two. Zero without any value."""
    if not sizes:
        return 0.0
    middle = (len(sizes) - 1) // 2
    return sorted(sizes)[middle]


def over_limit(
    sizes: Sizes,
    history: Mapping[str, Sequence[float]],
    previous: float,
    limit: float,
    blamed: Collection[str] = (),
) -> Reasons:
    """Clients with an update that is too large, with the reason; none when the limit is 0 (off).

    sizes: this round's by client. history: the accepted ones of earlier rounds. previous: the model's norm
    blamed: clients whose update stood out in a round that was taken back; from then on their limit is STANDS_OUT
    """
    if not limit:
        return {}
    refused: Reasons = {}
    ordered = sorted(sizes.values())
    for client, size in sizes.items():
        allowed, why = limit, "run.update_limit"
        if client in blamed:
            allowed = min(limit, STANDS_OUT)
            why = "the limit of a client that has ruined a model"
        usual = lower_median(history.get(client, ()))
        measure, whose = _measure(ordered, size, usual, previous)
        if measure and size > allowed * measure:
            norm = f"its update has the norm {size:.3g}"
            times = f"{size / measure:.3g} times {whose} ({measure:.3g})"
            if usual and len(ordered) > 1:
                times += f" and {size / usual:.3g} times its own earlier ones"
            refused[client] = f"{norm}, {times}; {why} is {allowed:g}"
    return both_of_two(refused, sizes)


def _measure(ordered: Sequence[float], size: float, usual: float, previous: float) -> tuple[float, str]:
    """The size with which that of an update is compared, and whose it is; the arguments are those of `over_limit`.

    ordered: this round's sizes in order
    usual: the median of the client's own earlier sizes; 0 without any
    """
    if len(ordered) > 1:
        return upper_median_of_others(ordered, size), "the median of the other replies"
    if usual:
        return usual, "the median of its own earlier rounds"
    return previous, "the model's norm"


def upper_median_of_others(ordered: Sequence[float], value: float) -> float:
    """Upper median of sorted values without one of them; zero without any other."""
    if len(ordered) < 2:
        return 0
    middle = (len(ordered) - 1) // 2
    place = bisect_left(ordered, value)
    if place <= middle:  # the value stands in the lower half, and counts no more
        middle += 1
    return ordered[middle]


def either(count: int) -> str:
    """What to add to the reason of a refusal that compares so many clients."""
    if count != 2:
        return ""
    return " (of two clients, either may be the wrong one)"


def both_of_two(refused: Mapping[str, str], clients: Collection[str]) -> Reasons:
    """The refused clients, with the reason; both when two are compared, because either may be the wrong one."""
    if not refused or len(clients) != 2:
        return dict(refused)
    (first, reason), *_ = refused.items()
    reasons: Reasons = {}
    for client in clients:
        whose = "" if client == first else f"of client {first!r}: "
        reasons[client] = f"{whose}{reason}{either(2)}"
    return reasons


def model_norm(model: Arrays) -> float:
    """L2 norm of the floating-point tensors; infinite when it is beyond float64."""
    return update_size(model, {})


def remember(history: MutableMapping[str, list[float]], client: str, size: float) -> None:
    """Add the size of an accepted update to the history of its client, if that is one of the first clients."""
    if not has_room(history, client):
        return
    sizes = history.get(client, [])
    history[client] = [*sizes, size][-KEPT_SIZES:]


def has_room(table: Collection[str], client: str) -> bool:
    """Whether a table by clients may have a line for this one: it has it, or is not full."""
    return client in table or len(table) < MOST_HISTORIES


def lower(lowest: MutableMapping[str, float], client: str, loss: float) -> None:
    """Keep the lowest loss of a client's validations, if that is one of the first clients."""
    if has_room(lowest, client):
        before = lowest.get(client, loss)
        lowest[client] = min(loss, before)


COUNTS = {"gradient_count", "steps", "learning_rate"}
TRAINING_LOSSES = {"received_loss", "train_loss", "gap"}  # a gap is a difference of losses
USUAL_LOSS = 1.0  # of clients whose models are good the losses differ by any factor, and none is too large for it


def metrics_over_limit(
    metrics: Mapping[str, Sizes], needed: Collection[str], run: RunSettings, momentum: float
) -> Reasons:
    """Clients with a number that is too large, with the reason. Only numbers that a server part needs are compared.

    Losses are limited by `run.update_limit`. Counts follow the numbers of examples and are limited by
    `run.examples_limit` / (1 - momentum), because with momentum a gradient counts up to 1 / (1 - momentum) times.
    """
    if len(metrics) < 2:
        return {}
    refused: Reasons = {}
    compared = (COUNTS | TRAINING_LOSSES) & set(needed)
    for name in sorted(compared):
        is_loss = name in TRAINING_LOSSES
        setting = "update_limit" if is_loss else "examples_limit"
        limit = getattr(run, setting)
        allowed = limit if is_loss else limit / (1 - momentum)
        least = USUAL_LOSS if is_loss else 0.0
        values = {client: numbers[name] for client, numbers in metrics.items()}
        ordered = sorted(map(abs, values.values()))
        for client, value in values.items():
            size = abs(value)
            median = upper_median_of_others(ordered, size)
            bound = allowed * max(median, least)
            if bound > 0 and size > bound:
                reported = f"its {name} is {value:.3g}"
                comparison = f"the median of the others {median:.3g}"
                reason = f"{reported}, {comparison}; run.{setting} is {limit:g}"
                refused.setdefault(client, reason)
    return both_of_two(refused, metrics)


def doubtful_losses(losses: Sizes, signed: bool, limit: float) -> Reasons:
    """Clients whose training loss cannot be true, with the reason.

    losses: by client. signed: whether a loss of this recipe may be below 0. A loss whose size is more than `limit`
    (0: off) times the upper median of the others' and of 1 is none of the same task.
    """
    reasons: Reasons = {}
    ordered = sorted(map(abs, losses.values()))
    is_compared = limit > 0 and len(losses) > 1
    for client, loss in losses.items():
        size = abs(loss)
        median = upper_median_of_others(ordered, size)
        usual = max(median, USUAL_LOSS)
        if loss < 0 and not signed:
            reasons[client] = f"{loss:.3g} is below 0"
        elif is_compared and size > limit * usual:
            times = f"{limit:g} times that of the others ({median:.3g})"
            reasons[client] = f"{loss:.3g} is more than {times}"
    return reasons


def records_over_limit(sizes: Sizes, model: Arrays, limit: float) -> Reasons:
    """Clients with a record of a bank that is too large, with the reason; none when the limit is 0 (off).

    sizes: the norms of the records by client
    model: the model of the start of the round. A record with a smaller norm than the model is never refused, because
    records of models that fit well (gradients that are almost 0) differ by any factor.
    """
    if not limit:
        return {}
    refused: Reasons = {}
    ordered = sorted(sizes.values())
    for client, size in sizes.items():
        median = upper_median_of_others(ordered, size)
        bound = limit * median
        stands_out = median > 0 and size > bound
        if stands_out and size > model_norm(model):
            norm = f"its record has the norm {size:.3g}"
            times = f"{size / median:.3g} times the median of the others ({median:.3g})"
            refused[client] = f"{norm}, {times}; run.update_limit is {limit:g}"
    return both_of_two(refused, sizes)
