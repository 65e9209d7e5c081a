"""Figures that CSAC and FedIG-A draw: single layers, clients' models on all domains, alpha of each image, settings.

Each function takes records of one experiment. docs/results-reference.md says which figure of a paper each is.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedsim.analysis.figure_style import (
    COLORS,
    Looks,
    Style,
    band,
    legend_below,
    panels,
    set_title,
    styles,
    unseen,
    written,
)
from fedsim.analysis.statistics import most_seeds, over_seeds
from fedsim.common.lists import keys_of
from fedsim.common.tasks import BY_METRIC, CLASSIFICATION, task_of
from fedsim.common.values import JsonTable
from fedsim.records.alphas import Alphas
from fedsim.records.client_rows import client_key
from fedsim.records.differences import IDENTITY, comparable_settings, flatten
from fedsim.records.reading import Runs

FUSED = "fused"  # the name of the fused model besides those of clients
WITHIN, ACROSS = "distance_within", "distance_across"
DISTANCES = {WITHIN: "same domain", ACROSS: "different domains"}
LOCAL_START, FUSED_START = "local_", "fused_"  # of quantities in details.csv, before the task's metric
WIDTH = 0.7  # of the images of a layer, where layers are one apart
MOST_RATIO = 10  # of the values of a setting, from which on their axis is logarithmic
MOST_CELLS = 14  # columns of a matrix whose cells have room for numbers


def is_of_models(quantity: str) -> bool:
    """Whether a quantity of details.csv has figures of its own here, those of clients' and fused models."""
    return quantity in DISTANCES or quantity.startswith((LOCAL_START, FUSED_START))


def alpha_of_images(alphas: Mapping[str, Sequence[Alphas]], name: str, label: str) -> Figure:
    """alpha of every test image in every layer, a panel for each unseen domain; a black line is the mean of a layer.

    alphas: those of all seeds by target. The images of a layer lie side by side in the order of their numbers.
    """
    heads = list(map(unseen, alphas))
    figure, axes = panels(1, heads, f"{name}, {label}: alpha of each test image, selected model")
    for panel, of_seeds in zip(axes[0], alphas.values()):
        _alpha_points(panel, of_seeds)
        _name_ticks(panel, of_seeds[0].layers)
        panel.set_ylim(-0.03, 1.03)
    axes[0][0].set_ylabel("alpha")
    return figure


def _alpha_points(panel: Axes, of_seeds: Sequence[Alphas]) -> None:
    """Draw a point for each image in each layer, and the layers' means."""
    alpha = np.concatenate([each.alpha for each in of_seeds], axis=1)
    index = np.concatenate([each.index for each in of_seeds])
    order = np.argsort(index, kind="stable")
    ends = np.array([-WIDTH / 2, WIDTH / 2])
    places = np.linspace(-WIDTH / 2, WIDTH / 2, len(index))
    for number, values in enumerate(alpha[:, order]):
        panel.scatter(
            number + places,
            values,
            s=3,
            alpha=0.5,
            linewidths=0,
            color=COLORS[number % len(COLORS)],
        )
        mean = values.mean()
        panel.plot(
            number + ends,
            [mean, mean],
            color="black",
            linewidth=1.2,
        )


def layer_over_rounds(details: pd.DataFrame, layer: str, name: str, label: str, quantity: str) -> Figure:
    """One quantity of one layer or tensor over the rounds, a line for each client (domain) and a panel per target."""
    clients = details["client"].fillna("server")
    frame, key, _ = client_key(details.assign(client=clients.astype(str)))
    targets = sorted(frame["target"].unique())
    over = over_seeds(frame["seed"].nunique())
    title = quantity.replace("_", " ")
    heads = list(map(unseen, targets))
    heading = f"{name}, {label}: {title} of {layer} ({over})"
    figure, axes = panels(1, heads, heading)
    looks = styles(sorted(frame[key].unique()))
    for panel, target in zip(axes[0], targets):
        of_target = frame[frame["target"] == target]
        groups = of_target.groupby([key, "seed", "round"], as_index=False)
        means = groups["value"].mean()
        for client, line in means.groupby(key):
            band(
                panel,
                line,
                "value",
                looks[client],
                client,
                rounds=means["round"].unique(),
            )
        panel.set_xlabel("round")
    axes[0][0].set_ylabel(title)
    legend_below(figure, looks)
    return figure


def local_models(details: pd.DataFrame, name: str, label: str) -> Figure | None:
    """The model of each client (row) and the fused one on each domain (column), in the first and the last round.

    details: rows of one method. Round 0 is a prelude, such as CSAC's acquisition. None without these models. Values
    are means over seeds.
    """
    is_model = details["quantity"].str.startswith((LOCAL_START, FUSED_START))
    frame = details[is_model]
    if frame.empty:
        return None
    models = frame["client"].fillna(FUSED)
    frame = frame.assign(client=models)
    targets = sorted(frame["target"].unique())
    rounds = sorted({frame["round"].min(), frame["round"].max()})
    figure = _figure_of_matrices(
        rows=len(rounds),
        columns=len(targets),
        height=models.nunique(),
        width=frame["name"].nunique(),
    )
    axes = figure.subplots(len(rounds), len(targets), squeeze=False)
    first = frame["quantity"].iloc[0]
    metric = first.partition("_")[2]
    is_fraction = BY_METRIC.get(metric, CLASSIFICATION).is_fraction
    heading = metric.replace("_", " ")
    if is_fraction:
        heading += " (%)"
    seeds = "mean over seeds" if frame["seed"].nunique() > 1 else "one seed"
    of_models = "of each client's model and of the fused one on each domain"
    set_title(figure, f"{name}, {label}: {heading} {of_models} ({seeds})")
    shown = frame[frame["round"].isin(rounds)]
    for row, number in zip(axes, rounds):
        of_round = shown[shown["round"] == number]
        _models_of_round(row, of_round, targets, is_fraction, shown["value"].max())
    return figure


def _models_of_round(
    row: Sequence[Axes], frame: pd.DataFrame, targets: Sequence[str], is_fraction: bool, greatest: float
) -> None:
    """Draw the matrix of each target in a round; greatest: the value at the end of the colours of no fraction."""
    number = frame["round"].iloc[0]
    for panel, target in zip(row, targets):
        table = _by_model(frame[frame["target"] == target])
        if is_fraction:
            _matrix(panel, 100 * table, 100)
        else:
            _matrix(panel, table, greatest, ".3g")
        panel.set_title(f"{unseen(target)}, round {number}")


def _by_model(frame: pd.DataFrame) -> pd.DataFrame:
    """Means over seeds by client and domain, with the fused model in the last row."""
    table = frame.pivot_table(
        index="client",
        columns="name",
        values="value",
        aggfunc="mean",
    )
    order = sorted(table.index, key=lambda client: (client == FUSED, client))
    return table.reindex(order)


def _figure_of_matrices(rows: int, columns: int, height: int, width: int) -> Figure:
    """A figure with room for matrices of this height and width in cells."""
    across = columns * (0.5 * width + 1.3) + 0.6
    down = rows * (0.32 * height + 0.9) + 0.8
    return Figure(figsize=(across, down), layout="constrained")


def layer_distances(details: pd.DataFrame, name: str, label: str) -> Figure | None:
    """Distances between the clients' models in each tensor, of one domain and of different ones, in the last round.

    details: rows of one method. None without distances. Values are means over seeds, with their deviations as bars.
    """
    frame = details[details["quantity"].isin(DISTANCES)]
    if frame.empty:
        return None
    last = frame["round"].max()
    frame = frame[frame["round"] == last]
    targets = sorted(frame["target"].unique())
    tensors = list(frame["name"].unique())
    over = over_seeds(frame["seed"].nunique())
    title = f"{name}, {label}: distance of clients' models after training in round {last} ({over})"
    heads = list(map(unseen, targets))
    figure, axes = panels(1, heads, title)
    looks = styles(DISTANCES.values())
    for panel, target in zip(axes[0], targets):
        of_target = frame[frame["target"] == target]
        for quantity, legend in DISTANCES.items():
            distances = of_target[of_target["quantity"] == quantity]
            _distance_line(panel, distances, tensors, looks[legend], legend)
        _name_ticks(panel, tensors)
    axes[0][0].set_ylabel("root mean squared difference")
    legend_below(figure, looks)
    return figure


def _distance_line(
    panel: Axes,
    distances: pd.DataFrame,
    tensors: Sequence[str],
    style: Style,
    legend: str,
) -> None:
    """Draw the distances of the tensors, if there are any."""
    if distances.empty:
        return
    of_tensors = distances.groupby("name")["value"]
    values = of_tensors.agg(["mean", "std"]).reindex(tensors)
    panel.errorbar(
        range(len(tensors)),
        values["mean"],
        yerr=values["std"].fillna(0),
        color=style.color,
        linestyle=style.line,
        marker=style.marker,
        markersize=3.5,
        label=legend,
    )


def classes_by_client(counts: Mapping[str, Mapping[str, Sequence[int]]], classes: Sequence[str], name: str) -> Figure:
    """Training images of each class (column) of each client (row), a panel for each unseen domain.

    counts: {target: {client: images by class}}
    """
    figure = _figure_of_matrices(
        rows=1,
        columns=len(counts),
        height=max(map(len, counts.values())),
        width=len(classes),
    )
    axes = figure.subplots(1, len(counts), squeeze=False)
    set_title(figure, f"{name}: training images of each client by class (one run of each unseen domain)")
    for panel, (target, by_client) in zip(axes[0], counts.items()):
        table = pd.DataFrame(by_client, index=list(classes)).T
        _matrix(panel, table, table.to_numpy().max())
        panel.set_title(unseen(target))
    return figure


def swept_settings(runs: Runs) -> dict[str, pd.DataFrame]:
    """{setting: rows of finished runs} of the settings that alone vary, as numbers, between the runs of a method.

    The rows are those of the summary, with the columns `value` and `label` (the method).
    """
    tables: dict[str, dict[str, JsonTable]] = {}  # the settings by method and run
    for run in runs.summary["run"]:
        experiment = runs.comparable[run]
        of_method = tables.setdefault(experiment.method_name, {})
        of_method[run] = flatten(comparable_settings(experiment))
    swept: dict[str, list[pd.DataFrame]] = {}
    for method, by_run in tables.items():
        varied = _varied(by_run.values())
        if len(varied) != 1:
            continue
        key = varied[0]
        values = {run: table.get(key) for run, table in by_run.items()}
        if not all(map(_is_number, values.values())):
            continue
        rows = runs.summary[runs.summary["run"].isin(list(values))]
        numbers = rows["run"].map(values)
        rows = rows.assign(value=numbers.astype(float), label=method)
        swept.setdefault(key, []).append(rows)
    return {key: pd.concat(frames) for key, frames in swept.items()}


def _varied(tables: Collection[JsonTable]) -> list[str]:
    """The settings in which these tables differ, besides the target and the seed."""
    varied = []
    for key in keys_of(tables):
        texts = {str(table.get(key)) for table in tables}
        if len(texts) > 1 and key not in IDENTITY:
            varied.append(key)
    return varied


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def over_setting(rows: pd.DataFrame, key: str, name: str, select: str, looks: Looks) -> Figure | None:
    """The primary metric on the unseen domains over the values of a setting, a line for each method.

    rows: those of `swept_settings`. There is a panel for each target, and one for the average over all targets of the
    seeds that have all. The band is one sample standard deviation over seeds. None without a value.
    """
    task = task_of(rows, f"{select}_target_")
    column = f"{select}_target_{task.metric}"
    if column not in rows or rows[column].isna().all():
        return None
    factor, unit = (100, " (%)") if task.is_fraction else (1, "")
    parts = _by_target(rows, column)
    seeds = over_seeds(most_seeds(rows))
    title = f"{name}: {task.title}{unit} over {key} ({seeds})"
    figure, axes = panels(1, list(parts), title)
    values = sorted(rows["value"].unique())
    for panel, part in zip(axes[0], parts.values()):
        places = part.assign(round=part["value"])
        for label, line in places.groupby("label"):
            band(
                panel,
                line,
                column,
                looks[label],
                label,
                factor,
            )
        _value_axis(panel, values)
        panel.set_xlabel(written(key))
    axes[0][0].set_ylabel(f"{task.title}{unit}")
    legend_below(figure, looks)
    return figure


def _by_target(rows: pd.DataFrame, column: str) -> dict[str, pd.DataFrame]:
    """{title of a panel: its rows}: of each target, and where there are several of their average."""
    parts = {}
    targets = sorted(rows["target"].unique())
    for target in targets:
        parts[unseen(target)] = rows[rows["target"] == target]
    if len(targets) > 1:
        grid = rows.pivot_table(
            index=["label", "value", "seed"],
            columns="target",
            values=column,
        )
        complete = grid.dropna()
        average = complete.mean(axis=1).rename(column)
        parts["average"] = average.reset_index()
    return parts


def _value_axis(panel: Axes, values: Sequence[float]) -> None:
    """Marks the values of a setting, on a logarithmic axis where they are far apart."""
    if values[0] > 0 and values[-1] >= MOST_RATIO * values[0]:
        panel.set_xscale("log")
        panel.minorticks_off()
    texts = [f"{value:g}" for value in values]
    panel.set_xticks(values, texts)


def _name_ticks(panel: Axes, names: Sequence[str]) -> None:
    """Names the places 0, 1, ... of an axis, upright because there may be many."""
    short = [written(each.removeprefix("backbone."), 24) for each in names]
    panel.set_xticks(
        range(len(names)),
        short,
        rotation=90,
        fontsize=7,
    )


def _matrix(panel: Axes, table: pd.DataFrame, most: float, form: str = ".0f") -> None:
    """Draws a table of numbers from 0 to `most` as a picture, with the numbers in its cells where there is room.

    form: how a number is written
    """
    values = table.to_numpy(float)
    most = most or 1
    panel.imshow(
        values,
        vmin=0,
        vmax=most,
        cmap="Blues",
        aspect="auto",
    )
    panel.grid(visible=False)
    columns = [written(str(each), 14) for each in table.columns]
    rows = [written(str(each), 14) for each in table.index]
    panel.set_xticks(range(len(columns)), columns, rotation=90)
    panel.set_yticks(range(len(rows)), rows)
    if len(columns) > MOST_CELLS:
        return
    for (row, column), value in np.ndenumerate(values):
        if np.isnan(value):
            continue
        colour = "white" if value > 0.55 * most else "#222222"
        panel.text(
            column,
            row,
            f"{value:{form}}",
            ha="center",
            va="center",
            fontsize=7,
            color=colour,
        )
