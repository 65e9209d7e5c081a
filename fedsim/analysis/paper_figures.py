"""Figures that CSAC and FedIG-A draw: single layers, clients' models on all domains, alpha of each image, settings.

Each function takes records of one experiment. docs/results.md says which figure of a paper each is.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedsim.analysis.figure_style import COLORS, Looks, band, legend_below, panels, set_title, styles, unseen, written
from fedsim.analysis.statistics import most_seeds, over_seeds
from fedsim.common.tasks import task_of
from fedsim.records.alphas import Alphas
from fedsim.records.client_rows import client_key
from fedsim.records.differences import IDENTITY, comparable_settings, flatten
from fedsim.records.reading import Runs
from fedsim.settings.experiment import Experiment

FUSED = "fused"  # the name of the fused model beside those of clients
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
    figure, axes = panels(1, list(map(unseen, alphas)), f"{name}, {label}: alpha of each test image, selected model")
    for panel, of_seeds in zip(axes[0], alphas.values()):
        layers = of_seeds[0].layers
        alpha = np.concatenate([each.alpha for each in of_seeds], axis=1)
        order = np.argsort(np.concatenate([each.index for each in of_seeds]), kind="stable")
        places = np.linspace(-WIDTH / 2, WIDTH / 2, alpha.shape[1]) if alpha.shape[1] > 1 else np.zeros(1)
        for number, values in enumerate(alpha[:, order]):
            panel.scatter(number + places, values, s=3, alpha=0.5, linewidths=0, color=COLORS[number % len(COLORS)])
            panel.plot([number - WIDTH / 2, number + WIDTH / 2], [values.mean()] * 2, color="black", linewidth=1.2)
        _name_ticks(panel, layers)
        panel.set_ylim(-0.03, 1.03)
    axes[0][0].set_ylabel("alpha")
    return figure


def layer_over_rounds(details: pd.DataFrame, layer: str, name: str, label: str, quantity: str) -> Figure:
    """One quantity of one layer or tensor over the rounds, a line for each client (domain) and a panel per target."""
    frame, key, _ = client_key(details.assign(client=details["client"].fillna("server").astype(str)))
    targets = sorted(frame["target"].unique())
    over = over_seeds(frame["seed"].nunique())
    title = quantity.replace("_", " ")
    figure, axes = panels(1, list(map(unseen, targets)), f"{name}, {label}: {title} of {layer} ({over})")
    looks = styles(sorted(frame[key].unique()))
    for panel, target in zip(axes[0], targets):
        of_target = frame[frame["target"] == target]
        means = of_target.groupby([key, "seed", "round"], as_index=False)["value"].mean()
        for client, line in means.groupby(key):
            band(panel, line, "value", looks[client], client, rounds=means["round"].unique())
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
    targets = sorted(frame["target"].unique())
    rounds = sorted({frame["round"].min(), frame["round"].max()})
    title = frame["quantity"].iloc[0].partition("_")[2].replace("_", " ")
    head = f"{name}, {label}: {title} (%) of each client's model and of the fused one on each domain"
    models = frame["client"].fillna(FUSED)
    frame = frame.assign(client=models)
    size = models.nunique(), frame["name"].nunique()
    figure = Figure(figsize=(len(targets) * (0.5 * size[1] + 1.3) + 0.6, len(rounds) * (0.32 * size[0] + 0.9) + 0.8),
                    layout="constrained")  # fmt: skip
    axes = figure.subplots(len(rounds), len(targets), squeeze=False)
    set_title(figure, f"{head} ({'mean over seeds' if frame['seed'].nunique() > 1 else 'one seed'})")
    for row, number in zip(axes, rounds):
        for panel, target in zip(row, targets):
            shown = frame[(frame["round"] == number) & (frame["target"] == target)]
            table = shown.pivot_table(index="client", columns="name", values="value", aggfunc="mean")
            clients = [client for client in table.index if client != FUSED]
            table = table.reindex([*clients, *table.index.difference(clients)])
            _matrix(panel, 100 * table, "{:.0f}", (0, 100))
            panel.set_title(f"{unseen(target)}, round {number}")
    return figure


def layer_distances(details: pd.DataFrame, name: str, label: str) -> Figure | None:
    """Distances between the clients' models in each tensor, of one domain and of different ones, in the last round.

    details: rows of one method. None without distances. Values are means over seeds, with their deviations as bars.
    """
    frame = details[details["quantity"].isin(DISTANCES)]
    if frame.empty:
        return None
    targets = sorted(frame["target"].unique())
    last = frame["round"].max()
    frame = frame[frame["round"] == last]
    tensors = list(frame["name"].unique())
    over = over_seeds(frame["seed"].nunique())
    title = f"{name}, {label}: distance of clients' models after training in round {last} ({over})"
    figure, axes = panels(1, list(map(unseen, targets)), title)
    looks = styles(DISTANCES.values())
    for panel, target in zip(axes[0], targets):
        of_target = frame[frame["target"] == target]
        for quantity, words in DISTANCES.items():
            values = of_target[of_target["quantity"] == quantity].groupby("name")["value"].agg(["mean", "std"])
            if values.empty:
                continue
            values = values.reindex(tensors)
            style = looks[words]
            panel.errorbar(range(len(tensors)), values["mean"], yerr=values["std"].fillna(0), color=style.color,
                           linestyle=style.line, marker=style.marker, markersize=3.5, label=words)  # fmt: skip
        _name_ticks(panel, tensors)
    axes[0][0].set_ylabel("root mean squared difference")
    legend_below(figure, looks)
    return figure


def classes_by_client(counts: Mapping[str, Mapping[str, Sequence[int]]], classes: Sequence[str], name: str) -> Figure:
    """Training images of each class (column) of each client (row), a panel for each unseen domain.

    counts: {target: {client: images by class}}
    """
    most = max(map(len, counts.values()))
    width, height = len(counts) * (0.42 * len(classes) + 1.2) + 0.4, 0.3 * most + 1.6
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, len(counts), squeeze=False)
    set_title(figure, f"{name}: training images of each client by class (one run of each unseen domain)")
    for panel, (target, by_client) in zip(axes[0], counts.items()):
        table = pd.DataFrame(by_client, index=list(classes)).T
        _matrix(panel, table, "{:.0f}", (0, table.to_numpy().max()))
        panel.set_title(unseen(target))
    return figure


def swept_settings(runs: Runs) -> dict[str, pd.DataFrame]:
    """{setting: rows of finished runs} of the settings that alone vary, as numbers, between the runs of a method.

    The rows are those of the summary, with the columns `value` and `label` (the method).
    """
    tables: dict[str, dict[str, dict[str, Any]]] = {}  # by method and run
    for run in runs.summary["run"]:
        experiment = runs.comparable[run]
        tables.setdefault(experiment.method_name, {})[run] = _settings(experiment)
    swept: dict[str, list[pd.DataFrame]] = {}
    for method, by_run in tables.items():
        keys = dict.fromkeys(key for table in by_run.values() for key in table)
        varied = [key for key in keys if len({str(table.get(key)) for table in by_run.values()}) > 1]
        if len(varied) != 1:
            continue
        values = {run: table.get(varied[0]) for run, table in by_run.items()}
        if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values.values()):
            continue
        rows = runs.summary[runs.summary["run"].isin(list(values))]
        rows = rows.assign(value=rows["run"].map(values).astype(float), label=method)
        swept.setdefault(varied[0], []).append(rows)
    return {key: pd.concat(frames) for key, frames in swept.items()}


def _settings(experiment: Experiment) -> dict[str, Any]:
    """The settings by which runs are compared, by dotted name, without the method, the target and the seed."""
    table = flatten(comparable_settings(experiment))
    return {key: value for key, value in table.items() if key not in IDENTITY}


def over_setting(rows: pd.DataFrame, key: str, name: str, select: str, looks: Looks) -> Figure | None:
    """The primary metric on the unseen domains over the values of a setting, a line for each method.

    rows: those of `swept_settings`. There is a panel for each target, and one for the average over all targets of the
    seeds that have all. The band is one sample standard deviation over seeds. None without a value.
    """
    task = task_of(rows, f"{select}_target_")
    column = f"{select}_target_{task.metric}"
    if column not in rows or rows[column].isna().all():
        return None
    targets = sorted(rows["target"].unique())
    heads = list(map(unseen, targets))
    grid = rows.pivot_table(index=["label", "value", "seed"], columns="target", values=column)
    average = grid.dropna().mean(axis=1).rename(column).reset_index()
    parts = [rows[rows["target"] == target] for target in targets]
    if len(targets) > 1:
        heads.append("average")
        parts.append(average)
    unit = " (%)" if task.is_fraction else ""
    title = f"{name}: {task.title}{unit} over {key} ({over_seeds(most_seeds(rows))})"
    figure, axes = panels(1, heads, title)
    values = sorted(rows["value"].unique())
    for panel, part in zip(axes[0], parts):
        for label, line in part.groupby("label"):
            band(panel, line.assign(round=line["value"]), column, looks[label], label, 100 if task.is_fraction else 1)
        if values[0] > 0 and values[-1] >= MOST_RATIO * values[0]:
            panel.set_xscale("log")
            panel.minorticks_off()
        panel.set_xticks(values, [f"{value:g}" for value in values])
        panel.set_xlabel(written(key))
    axes[0][0].set_ylabel(f"{task.title}{unit}")
    legend_below(figure, looks)
    return figure


def _name_ticks(panel: Axes, names: Sequence[str]) -> None:
    """Names the places 0, 1, ... of an axis, upright where there are many."""
    short = [written(each.removeprefix("backbone."), 24) for each in names]
    panel.set_xticks(range(len(names)), short, rotation=90, fontsize=7)


def _matrix(panel: Axes, table: pd.DataFrame, form: str, bounds: tuple[float, float]) -> None:
    """Draws a table as a picture, with its numbers in the cells where there is room."""
    values = table.to_numpy(float)
    panel.imshow(values, vmin=bounds[0], vmax=bounds[1] or 1, cmap="Blues", aspect="auto")
    panel.grid(visible=False)
    panel.set_xticks(range(table.shape[1]), [written(str(each), 14) for each in table.columns], rotation=90)
    panel.set_yticks(range(table.shape[0]), [written(str(each), 14) for each in table.index])
    if table.shape[1] > MOST_CELLS:
        return
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            is_dark = value > bounds[0] + 0.55 * (bounds[1] - bounds[0])
            panel.text(column, row, form.format(value), ha="center", va="center", fontsize=7,
                       color="white" if is_dark else "#222222")  # fmt: skip
