"""Limits of what clients report beside their models: numbers that a rule computes with, and records of banks.

A value is compared with the upper median of the other clients' values of the same round (update_limit.py says why the
upper one). Values that are too small need no limit here: the rules divide by sums over the clients, and where a rule
divides by one client's number, the move of the fused model is limited (Guard.too_far).
"""

from collections.abc import Collection, Mapping

from fedsim.settings import RunSettings
from strategies.parts import Arrays
from strategies.wire.update_limit import both_of_two, model_norm, upper_median_of_others

COUNTS = {"gradient_count", "steps", "learning_rate"}
TRAINING_LOSSES = {"received_loss", "train_loss"}
USUAL_LOSS = 1.0  # of clients whose models are good the losses differ by any factor, and none is too large for it


def metrics_over_limit(
    metrics: Mapping[str, Mapping[str, float]], needed: Collection[str], run: RunSettings, momentum: float
) -> dict[str, str]:
    """Clients with a number that is too large, with the reason. Only numbers that a server part needs are compared.

    Losses are limited by `run.update_limit`. Counts follow the numbers of examples and are limited by
    `run.examples_limit` / (1 - momentum), because with momentum a gradient counts up to 1 / (1 - momentum) times.
    """
    refused: dict[str, str] = {}
    for name in sorted((COUNTS | TRAINING_LOSSES) & set(needed)) if len(metrics) > 1 else ():
        setting = "update_limit" if name in TRAINING_LOSSES else "examples_limit"
        limit = getattr(run, setting) / (1 if name in TRAINING_LOSSES else 1 - momentum)
        ordered = sorted(values[name] for values in metrics.values())
        for client, values in metrics.items():
            median = upper_median_of_others(ordered, values[name])
            bound = max(median, USUAL_LOSS) if name in TRAINING_LOSSES else median
            if limit and bound > 0 and values[name] > limit * bound:
                comparison = f"its {name} is {values[name]:.3g}, the median of the others {median:.3g}"
                refused.setdefault(client, f"{comparison}; run.{setting} is {getattr(run, setting):g}")
    return both_of_two(refused, metrics)


def records_over_limit(sizes: Mapping[str, float], model: Arrays, limit: float) -> dict[str, str]:
    """Clients with a record of a bank that is too large, with the reason; none when the limit is 0 (off).

    sizes: the norms of the records by client
    model: the model of the start of the round. A record with a smaller norm than the model is never refused, because
    records of models that fit well (gradients that are almost 0) differ by any factor.
    """
    refused, ordered = {}, sorted(sizes.values())
    for client, size in sizes.items() if limit else ():
        median = upper_median_of_others(ordered, size)
        if median and size > limit * median and size > model_norm(model):
            times = f"{size / median:.3g} times the median of the others ({median:.3g})"
            refused[client] = f"its record has the norm {size:.3g}, {times}; run.update_limit is {limit:g}"
    return both_of_two(refused, sizes)
