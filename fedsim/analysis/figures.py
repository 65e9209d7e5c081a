"""The figures: each function takes the records of one experiment and returns a Figure, or None if it lacks columns."""

from collections.abc import Iterable, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedsim.analysis.figure_style import (
    Looks,
    band,
    legend_below,
    legend_right,
    panels,
    styles,
    unseen,
    wrapped,
)
from fedsim.analysis.statistics import most_seeds, over_seeds
from fedsim.common.tasks import task_of
from fedsim.records.cases import STRUCTURE_QUANTITIES
from fedsim.records.client_rows import MOST_LINES, client_key, with_layer_groups

MOST_ROWS = 6
LEAST_RATIO = 1.1  # of the bytes of two methods, from which on curves over bytes show something new
CURVES = {"target": "target", "mean_validation": "validation"}  # {start of a column's name: start of its title}


def learning_curves(rounds: pd.DataFrame, name: str, looks: Looks, best: Sequence[str] = ()) -> Figure | None:
    """The primary metric per round on the target and in source validation, one column of panels per target.

    best: the labels in the order of a comparison, best first. Of more than MOST_LINES only the first ones are drawn,
    and fedavg, because nobody can tell more lines apart.
    """
    return _curves(rounds, "round", f"{name}: learning curves, all rounds", looks, best)


def curves_over_bytes(rounds: pd.DataFrame, name: str, looks: Looks, best: Sequence[str] = ()) -> Figure | None:
    """The curves of `learning_curves` over the megabytes that all clients together have sent until then.

    None where the methods send as much as each other, so that the axis would show nothing new.
    """
    if "bytes_up" not in rounds:
        return None
    frame = rounds.sort_values("round")
    sent = frame.groupby("run")["bytes_up"].cumsum()
    frame = frame.assign(megabytes=sent / 1e6)
    seeds = frame.groupby(["label", "target", "round"])
    frame["round"] = seeds["megabytes"].transform("mean")
    amounts = frame.groupby("label")["round"].max()
    least = LEAST_RATIO * amounts.min()
    if not amounts.max() > least:
        return None
    frame = frame[frame["round"] > 0]
    axis = "MB sent by all clients"
    heading = f"{name}: learning curves over megabytes"
    figure = _curves(frame, axis, heading, looks, best)
    if figure is None:
        return None
    for panel in figure.axes:
        panel.set_xscale("log")
    return figure


def _curves(rounds: pd.DataFrame, axis: str, heading: str, looks: Looks, best: Sequence[str]) -> Figure | None:
    """A panel for each curve and target; None where no curve has a value.

    rounds: its column `round` has the places on the horizontal axis, whose name is `axis`
    """
    curves = _curves_of(rounds)
    if not curves:
        return None
    targets = sorted(rounds["target"].unique())
    all_labels = list(rounds["label"].unique())
    labels, few = few_enough(all_labels, best)
    rounds = rounds[rounds["label"].isin(labels)]
    over = over_seeds(most_seeds(rounds))
    title = f"{heading} ({over}{few})"
    heads = list(map(unseen, targets))
    figure, axes = panels(len(curves), heads, title)
    for row, (column, heading) in zip(axes, curves.items()):
        row[0].set_ylabel(heading)
        for panel, target in zip(row, targets):
            of_target = rounds[rounds["target"] == target]
            for label, runs in of_target.groupby("label", sort=False):
                style = looks[label]
                band(panel, runs, column, style, label, scale=100 if task_of(rounds).is_fraction else 1)
    for panel in axes[-1]:
        panel.set_xlabel(axis)
    legend_below(figure, looks)
    return figure


def _curves_of(rounds: pd.DataFrame) -> dict[str, str]:
    """{column: its heading} of the columns of CURVES that have values."""
    task = task_of(rounds)
    curves = {}
    for start, heading in CURVES.items():
        column = f"{start}_{task.metric}"
        if column in rounds and rounds[column].notna().any():
            curves[column] = f"{heading} {task.title}{' (%)' if task.is_fraction else ''}"
    return curves


def few_enough(labels: list[str], best: Sequence[str]) -> tuple[list[str], str]:
    """At most MOST_LINES of the labels, in their order: the best and fedavg; and words for the title."""
    if len(labels) <= MOST_LINES:
        return labels, ""
    of_best = [label for label in best if label in labels]
    ordered = of_best or labels
    shown = ordered[:MOST_LINES]
    if "fedavg" in labels and "fedavg" not in shown:
        shown = [*ordered[: MOST_LINES - 1], "fedavg"]
    which = "best" if best else "first"
    if shown[-1] == "fedavg":
        which += " and fedavg"
    in_order = [label for label in labels if label in shown]
    words = f"; {MOST_LINES} of {len(labels)} methods: the {which}"
    return in_order, words


def metric_over_rounds(clients: pd.DataFrame, column: str, name: str) -> Figure | None:
    """One per-client quantity over rounds: a row of panels per method, a column per target, a line per client."""
    frame = clients.dropna(subset=[column])
    labels = _labels_that_vary(frame, column)
    if not labels:
        return None
    labels, few = _first_rows(labels)
    targets = sorted(frame["target"].unique())
    title = column.replace("_", " ")
    clients, key, of_what = client_key(clients)
    frame = frame.assign(**{key: clients[key]})
    over = _averaged_over(key, most_seeds(frame))
    heads = list(map(unseen, targets))
    title_of_all = f"{name}: {title} {of_what} ({over}{few})"
    figure, axes = panels(len(labels), heads, title_of_all)
    looks = _looks_of_clients(clients[key])
    for row, label in zip(axes, labels):
        row[0].set_ylabel(f"{wrapped(label)}\n{title}")
        runs = frame[frame["label"] == label]
        for panel, target in zip(row, targets):
            of_target = runs[runs["target"] == target]
            _client_lines(panel, of_target, key, column, looks)
        _start_at_zero(row[0], runs[column])
    _round_axis(axes[-1])
    legend_below(figure, looks)
    return figure


def _first_rows(labels: list[str]) -> tuple[list[str], str]:
    """(at most MOST_ROWS of the methods, words for the title where there are more)."""
    if len(labels) <= MOST_ROWS:
        return labels, ""
    few = f"; first {MOST_ROWS} of {len(labels)} methods"
    return labels[:MOST_ROWS], few


def _looks_of_clients(names: pd.Series) -> Looks:
    """The style of each client, which is the same in every figure, whichever methods have a row there."""
    clients = sorted(names.unique())
    if "pooled" in clients:  # it comes last
        clients.remove("pooled")
        clients.append("pooled")
    return styles(clients)


def _averaged_over(key: str, seeds: int) -> str:
    """What a point of a line is, in words; key: the column that has a value for each line."""
    if key == "domain":
        runs = "seeds" if seeds > 1 else "one seed"
        return f"mean ± std over clients, {runs}"
    return over_seeds(seeds)


def _start_at_zero(axes: Axes, values: pd.Series) -> None:
    """Begin the axis of a single number at zero: an axis around it would show differences of nothing."""
    low, high = values.min(), values.max()
    if high > 0 and high - low <= 1e-6 * high:
        axes.set_ylim(0, 1.1 * high)


def _labels_that_vary(frame: pd.DataFrame, column: str) -> list[str]:
    """The methods with a client whose quantity changes over the rounds; all methods where none has one.

    Weights by example counts, for example, never change.
    """
    clients = frame.groupby(["label", "run", "client"])
    numbers = clients[column].nunique()
    most = numbers.groupby("label").max()
    labels = list(frame["label"].unique())
    varying = [label for label in labels if most[label] > 1]
    return varying or labels


def _client_lines(axes: Axes, frame: pd.DataFrame, key: str, column: str, looks: Looks) -> None:
    """Draw a line for each client, or for each domain."""
    rounds = frame["round"].unique()
    for client, rows in frame.groupby(key):
        band(
            axes,
            rows,
            column,
            looks[client],
            client,
            rounds=rounds,
        )


def detail_over_rounds(details: pd.DataFrame, name: str, label: str, quantity: str) -> Figure:
    """One layer-wise quantity of one method over rounds: the upper row has means per domain, the lower per layer group.

    Shares of the clients, which sum to one, have the same mean in every layer; the lower row then shows their spread
    between clients. A quantity of a whole client, whose rows name no tensor, has only the upper row. Rows that name no
    client are of the server (the fused model). Rows of a segmentation name structures, not tensors.
    """
    frame = with_layer_groups(details)
    targets = sorted(frame["target"].unique())
    title = quantity.replace("_", " ")
    has_groups = bool(frame["group"].any())
    over = over_seeds(frame["seed"].nunique())
    rows = 2 if has_groups else 1
    heads = list(map(unseen, targets))
    title_of_all = f"{name}, {label}: {title} over rounds ({over})"
    figure, axes = panels(rows, heads, title_of_all)
    frame, client, _ = client_key(frame)
    # Domains are in the order of their names, as in every other figure; layers are in the order of the network.
    axes[0][0].set_ylabel(f"{title}\nper domain")
    _detail_lines(
        axes[0],
        frame,
        client,
        sorted(frame[client].unique()),
        targets,
    )
    if has_groups:
        _group_lines(axes[1], frame, quantity, targets)
    _round_axis(axes[-1])
    return figure


def _group_lines(row: Sequence[Axes], frame: pd.DataFrame, quantity: str, targets: list[str]) -> None:
    """Draw the row of panels that has a line for each group of layers."""
    title = quantity.replace("_", " ")
    below = "per structure" if quantity in STRUCTURE_QUANTITIES else "per layer group"
    groups = list(frame["group"].unique())
    if are_shares(frame):
        below = "spread between clients"
        keys = ["target", "group", "name", "seed", "round"]
        tensors = frame.groupby(keys, as_index=False, sort=False)
        frame = tensors["value"].std()
    row[0].set_ylabel(f"{title}\n{below}")
    _detail_lines(row, frame, "group", groups, targets)


def _detail_lines(row: Sequence[Axes], frame: pd.DataFrame, key: str, names: Sequence[str], targets: list[str]) -> None:
    """Draw a line of means for each of the names, which are values of the column `key`, in a panel per target."""
    looks = styles(names)
    for panel, target in zip(row, targets):
        values = frame[frame["target"] == target]
        groups = values.groupby([key, "seed", "round"], as_index=False, sort=False)
        means = groups["value"].mean()
        for part, line in means.groupby(key, sort=False):
            band(
                panel,
                line,
                "value",
                looks[part],
                str(part),
                rounds=means["round"].unique(),
            )
    legend_right(row, looks)


def are_shares(details: pd.DataFrame) -> bool:
    """Whether the values of all clients sum to one for every tensor."""
    if details["client"].nunique() < 2:
        return False
    tensors = details.groupby(["target", "seed", "round", "name"])
    apart = tensors["value"].sum() - 1
    return bool(apart.abs().max() < 1e-3)


def _shown_rounds(details: pd.DataFrame) -> list[int]:
    """The first, middle and last of the rounds, each once."""
    rounds = sorted(details["round"].unique())
    middle = rounds[len(rounds) // 2]
    shown = [rounds[0], middle, rounds[-1]]
    return list(dict.fromkeys(shown))


def detail_histogram(details: pd.DataFrame, name: str, label: str, quantity: str) -> Figure:
    """Distribution of one layer-wise quantity at the first, middle and last recorded round."""
    shown = _shown_rounds(details)
    targets = sorted(details["target"].unique())
    title = quantity.replace("_", " ")
    heads = list(map(unseen, targets))
    title_of_all = f"{name}, {label}: distribution of {title}"
    figure, axes = panels(1, heads, title_of_all)
    chosen = details[details["round"].isin(shown)]
    values = chosen["value"].astype(float)
    bounds = histogram_bounds(values.min(), values.max())
    looks = styles([f"round {number}" for number in shown])
    for panel, target in zip(axes[0], targets):
        of_target = chosen[chosen["target"] == target]
        for number in shown:
            is_drawn = of_target["round"] == number
            _histogram(
                panel,
                of_target.loc[is_drawn, "value"],
                bounds,
                looks,
                f"round {number}",
            )
        panel.set_xlabel(title)
        panel.xaxis.set_major_locator(MaxNLocator(nbins=5))
        panel.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes[0][0].set_ylabel("layers (of all clients, seeds)")
    legend_below(figure, looks)
    return figure


def _histogram(axes: Axes, values: pd.Series, bounds: tuple[float, float], looks: Looks, label: str) -> None:
    style = looks[label]
    axes.hist(
        values,
        bins=10 if len(values) < 200 else 25,
        range=bounds,
        histtype="step",
        linewidth=1.6,
        color=style.color,
        linestyle=style.line,
        label=label,
    )


def histogram_bounds(low: float, high: float) -> tuple[float, float]:
    """The range [0, 1] for fractions that use much of it; otherwise the range of the values, with a margin."""
    if low >= 0 and high <= 1 and high - low > 0.25:
        return 0.0, 1.0
    margin = 0.1 * (high - low) or 0.05
    return low - margin, high + margin


def _round_axis(axes: Iterable[Axes]) -> None:
    for panel in axes:
        panel.set_xlabel("round")
