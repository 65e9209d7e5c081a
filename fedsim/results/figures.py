"""The figures: each function takes the records of one experiment and returns a Figure, or None if it lacks columns."""

from collections.abc import Iterable, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedsim.common.tasks import task_of
from fedsim.results.cases import STRUCTURE_QUANTITIES
from fedsim.results.client_rows import MOST_LINES, client_key, layer_group
from fedsim.results.figure_style import (
    Looks,
    band,
    legend_below,
    legend_beside,
    panels,
    styles,
    unseen,
    wrapped,
)
from fedsim.results.statistics import most_seeds, over_seeds

MOST_ROWS = 6
CURVES = (("target", "target"), ("mean_validation", "validation"))  # (start of the column's name, start of the title)


def learning_curves(rounds: pd.DataFrame, name: str, looks: Looks, best: Sequence[str] = ()) -> Figure | None:
    """The primary metric per round on the target and in source validation, one column of panels per target.

    best: the labels in the order of a comparison, best first. Of more than MOST_LINES only the first ones are drawn,
    and fedavg, because nobody can tell more lines apart.
    """
    task = task_of(rounds)
    curves = [(f"{column}_{task.metric}", f"{words} {task.title} (%)") for column, words in CURVES]
    curves = [(column, title) for column, title in curves if column in rounds and rounds[column].notna().any()]
    if not curves:
        return None
    targets = sorted(rounds["target"].unique())
    labels, few = few_enough(list(rounds["label"].unique()), best)
    rounds = rounds[rounds["label"].isin(labels)]
    heading = f"{name}: learning curves, all rounds ({over_seeds(most_seeds(rounds))}{few})"
    figure, axes = panels(len(curves), list(map(unseen, targets)), heading)
    for row, (column, title) in zip(axes, curves):
        row[0].set_ylabel(title)
        for one, target in zip(row, targets):
            for label, frame in rounds[rounds["target"] == target].groupby("label", sort=False):
                band(one, frame, column, looks[label], label, scale=100)
    _round_axis(axes[-1])
    legend_below(figure, looks)
    return figure


def few_enough(labels: list[str], best: Sequence[str]) -> tuple[list[str], str]:
    """At most MOST_LINES of the labels, in their order: the best and fedavg; and words for the title."""
    if len(labels) <= MOST_LINES:
        return labels, ""
    ordered = [label for label in best if label in labels] or labels
    kept = ordered[:MOST_LINES]
    if "fedavg" in labels and "fedavg" not in kept:
        kept = [*ordered[: MOST_LINES - 1], "fedavg"]
    which = f"the {'best' if best else 'first'}{' and fedavg' if kept[-1] == 'fedavg' else ''}"
    return [label for label in labels if label in kept], f"; {MOST_LINES} of {len(labels)} methods: {which}"


def metric_over_rounds(clients: pd.DataFrame, column: str, name: str) -> Figure | None:
    """One per-client quantity over rounds: a row of panels per method, a column per target, a line per client."""
    frame = clients.dropna(subset=[column])
    moving = frame.groupby(["label", "run", "client"])[column].nunique().groupby("label").max()
    # Weights by example counts never change; methods with such a constant quantity are left out where another varies.
    chosen = [label for label in frame["label"].unique() if moving[label] > 1] or list(frame["label"].unique())
    if not chosen:
        return None
    left_out = f"; first {MOST_ROWS} of {len(chosen)} methods" if len(chosen) > MOST_ROWS else ""
    chosen, targets = chosen[:MOST_ROWS], sorted(frame["target"].unique())
    title = column.replace("_", " ")
    clients, key, of_what = client_key(clients)
    seeds = most_seeds(frame)
    over = over_seeds(seeds)
    if key == "domain":
        over = f"mean ± std over clients, {'seeds' if seeds > 1 else 'one seed'}"
    frame = frame.assign(**{key: clients[key]})
    figure, axes = panels(len(chosen), list(map(unseen, targets)), f"{name}: {title} {of_what} ({over}{left_out})")
    # A client has the same style in every figure, whichever methods have a row there.
    looks = styles(sorted(clients[key].unique(), key=lambda client: (client == "pooled", client)))
    for row, label in zip(axes, chosen):
        row[0].set_ylabel(f"{wrapped(label)}\n{title}")
        for one, target in zip(row, targets):
            part = frame[(frame["label"] == label) & (frame["target"] == target)]
            for client, own in part.groupby(key):
                band(one, own, column, looks[client], client, rounds=part["round"].unique())
        low, high = frame.loc[frame["label"] == label, column].agg(["min", "max"])
        if high > 0 and high - low <= 1e-6 * high:  # one number: an axis around it would show differences of nothing
            row[0].set_ylim(0, 1.1 * high)
    _round_axis(axes[-1])
    legend_below(figure, looks)
    return figure


def detail_over_rounds(details: pd.DataFrame, name: str, label: str, quantity: str) -> Figure:
    """One layer-wise quantity of one method over rounds: the upper row has means per domain, the lower per layer group.

    Shares of the clients, which sum to one, have the same mean in every layer; the lower row then shows their spread
    between clients. A quantity of a whole client, whose rows name no tensor, has only the upper row. Rows that name no
    client are of the server (the fused model). Rows of a segmentation name structures, not tensors.
    """
    frame = details.assign(
        group=details["name"].fillna("").map(layer_group), client=details["client"].fillna("server").astype(str)
    )
    targets = sorted(frame["target"].unique())
    title = quantity.replace("_", " ")
    rows = 2 if frame["group"].any() else 1
    words = over_seeds(frame["seed"].nunique())
    figure, axes = panels(rows, list(map(unseen, targets)), f"{name}, {label}: {title} over rounds ({words})")
    spread = bool(frame["group"].any()) and are_shares(frame)
    groups = "per structure" if quantity in STRUCTURE_QUANTITIES else "per layer group"
    below = f"{title}\n{'spread between clients' if spread else groups}"
    frame, who, _ = client_key(frame)
    for row, key, text in zip(axes, (who, "group"), (f"{title}\nper domain", below)):
        row[0].set_ylabel(text)
        # Domains are in the order of their names, as in every other figure; layers are in the order of the network.
        looks = styles(sorted(frame[key].unique()) if key == who else frame[key].unique())
        for one, target in zip(row, targets):
            own = frame[frame["target"] == target]
            if key == "group" and spread:
                own = own.groupby(["group", "name", "seed", "round"], as_index=False, sort=False)["value"].std()
            own = own.groupby([key, "seed", "round"], as_index=False, sort=False)["value"].mean()
            for part, values in own.groupby(key, sort=False):
                band(one, values, "value", looks[part], str(part), rounds=own["round"].unique())
        legend_beside(row, looks)
    _round_axis(axes[-1])
    return figure


def are_shares(details: pd.DataFrame) -> bool:
    """Whether the values of all clients sum to one for every tensor."""
    sums = details.groupby(["target", "seed", "round", "name"])["value"].sum()
    return details["client"].nunique() > 1 and bool((sums - 1).abs().max() < 1e-3)


def detail_histogram(details: pd.DataFrame, name: str, label: str, quantity: str) -> Figure:
    """Distribution of one layer-wise quantity at the first, middle and last recorded round."""
    rounds = sorted(details["round"].unique())
    shown = list(dict.fromkeys([rounds[0], rounds[len(rounds) // 2], rounds[-1]]))
    targets = sorted(details["target"].unique())
    figure, axes = panels(
        1, list(map(unseen, targets)), f"{name}, {label}: distribution of {quantity.replace('_', ' ')}"
    )
    chosen = details[details["round"].isin(shown)]
    bounds = histogram_bounds(float(chosen["value"].min()), float(chosen["value"].max()))
    looks = styles([f"round {round_}" for round_ in shown])
    for one, target in zip(axes[0], targets):
        own = chosen[chosen["target"] == target]
        for round_ in shown:
            style = looks[f"round {round_}"]
            values = own.loc[own["round"] == round_, "value"]
            one.hist(
                values,
                bins=10 if len(values) < 200 else 25,
                range=bounds,
                histtype="step",
                linewidth=1.6,
                color=style.color,
                linestyle=style.line,
                label=f"round {round_}",
            )
        one.set_xlabel(quantity.replace("_", " "))
        one.xaxis.set_major_locator(MaxNLocator(nbins=5))
        one.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes[0][0].set_ylabel("layers (of all clients, seeds)")
    legend_below(figure, looks)
    return figure


def histogram_bounds(low: float, high: float) -> tuple[float, float]:
    """The range [0, 1] for fractions that use much of it; otherwise the range of the values, with a margin."""
    if low >= 0 and high <= 1 and high - low > 0.25:
        return 0.0, 1.0
    margin = 0.1 * (high - low) or 0.05
    return low - margin, high + margin


def _round_axis(axes: Iterable[Axes]) -> None:
    for one in axes:
        one.set_xlabel("round")
