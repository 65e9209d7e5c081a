"""The numbers behind a report's charts and behind the page of each run, as one table of plain values for JSON.

They are of the same `Runs` and `Comparison` as the tables: nothing is read or selected a second time.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from fedsim.analysis.comparison import Comparison, shown_label
from fedsim.analysis.metrics import confusion_matrix
from fedsim.analysis.notes import missing_cells
from fedsim.analysis.reproduce import command_line
from fedsim.analysis.statistics import grid_of, interval, whole_run_costs
from fedsim.common.errors import UserError
from fedsim.common.tasks import task_of
from fedsim.records.client_rows import client_key, client_metrics, layer_group
from fedsim.records.differences import comparable_settings, value_text
from fedsim.records.predictions import read_predictions
from fedsim.records.reading import Runs, run_environment, run_folder
from fedsim.records.selection import RULES
from fedsim.settings.experiment import Experiment

Json = dict[str, Any]
MOST_CLASSES = 100  # a matrix with more would be most of the page
CURVES = {"target_{}": "target {} (%)", "mean_validation_{}": "source validation {} (%)", "train_loss": "training loss"}


def numbers(values: Iterable[float], factor: float = 1.0) -> list[float | None]:
    """Values for JSON, with five digits that count; None for what is missing or infinite."""
    return [float(f"{factor * value:.5g}") if np.isfinite(value) else None for value in map(float, values)]


def chart_data(runs: Runs, comparison: Comparison, groups: Mapping[str, str], pages: Mapping[str, int]) -> Json:
    """What the charts of one experiment show; pages: the place of each of its runs among the report's runs."""
    rounds = runs.rounds.assign(label=runs.rounds["run"].map(comparison.labels))
    steps = comparison.methods.set_index("label")["steps"]
    costs = whole_run_costs(rounds).join(steps)
    methods = []
    for method in comparison.methods.to_dict("records"):
        label = method["label"]
        methods.append(
            {
                "label": label,
                "shown": shown_label(method),
                "group": groups.get(method["method"], ""),
                "ranked": method["group"],
                "cells": _cells(comparison, label),
                "differences": _differences(comparison, label),
                "costs": dict(zip(costs, numbers(costs.loc[label]))) if label in costs.index else {},
                "runs": _pages(comparison, label, pages),
            }
        )
    return {
        "metric": comparison.measure.title,
        "rule": comparison.rule,
        "baseline": comparison.baseline,
        "seeds": comparison.most_seeds,
        "targets": comparison.targets,
        "curves": list(curve_titles(runs.rounds).items()),
        "missing": missing_cells(comparison.table, comparison.targets),
        "methods": methods,
    }


def _cells(comparison: Comparison, label: str) -> dict[str, list[float | None]]:
    """{target: [mean, deviation] in percent} of one method."""
    cells = comparison.cells[comparison.cells["label"] == label]
    return {cell.target: numbers([cell.mean, cell.std], 100) for cell in cells.itertuples()}


def _pages(comparison: Comparison, label: str, pages: Mapping[str, int]) -> list[list[Any]]:
    """[target, place of its page] of every run of one method."""
    table = comparison.table
    runs = table[table["label"] == label].sort_values(["target", "seed"])
    return [[target, pages[run]] for target, run in zip(runs["target"], runs["run"])]


def _differences(comparison: Comparison, label: str) -> dict[str, list[float | None]]:
    """{target, and `average` over all: [mean difference in points, lower and upper bound of its interval, pairs]}."""
    if comparison.baseline in ("", label):
        return {}
    grid = grid_of(comparison.table, label) - grid_of(comparison.table, comparison.baseline)
    differences = {}
    for name in ("average", *grid):
        cells = grid if name == "average" else grid[name]
        values = cells.to_numpy(dtype=float).ravel()
        values = values[np.isfinite(values)]
        if len(values):
            differences[name] = [*numbers(interval(values), 100), len(values)]
    return differences


def curve_titles(rounds: pd.DataFrame) -> dict[str, str]:
    """{column: title} of the columns of rounds.csv that are drawn and have values."""
    task = task_of(rounds)
    titles = {}
    for column, title in CURVES.items():
        name = column.format(task.metric)
        if name in rounds and rounds[name].notna().any():
            titles[name] = title.format(task.title)
    return titles


def run_data(runs: Runs, comparison: Comparison, shared: Mapping[str, object]) -> list[Json]:
    """The page of each run, in the order of the summaries; shared: settings of all runs, which a page leaves out."""
    rounds, clients, details = (_by_run(frame) for frame in (runs.rounds, runs.clients, runs.details))
    metrics = client_metrics(runs.clients)
    metric = task_of(runs.summary, "last_target_").metric
    titles = curve_titles(runs.rounds)
    no_rounds = runs.rounds.iloc[:0]
    pages = []
    for summary in runs.summary.to_dict("records"):
        run = summary["run"]
        experiment = runs.comparable[run]
        page = {
            "run": run,
            "label": comparison.labels[run],
            "target": summary["target"],
            "seed": int(summary["seed"]),
            "results": {rule: _result(summary, rule, metric) for rule in RULES},
            **_curves(rounds.get(run, no_rounds), titles),
            **(client_data(clients[run], metrics) if run in clients else {}),
            "details": detail_data(details[run]) if run in details else {},
            "confusion": confusion(runs, run, comparison.select),
            "settings": _own_settings(experiment, shared),
            "recipe": recipe(run_environment(runs, run)),
            "command": command_line(experiment, run_folder(runs, run) / "experiment.toml"),
        }
        pages.append(page)
    return pages


def _curves(rounds: pd.DataFrame, titles: Mapping[str, str]) -> Json:
    """The rounds of a run, and its curves; those whose title has a percent sign are in percent."""
    curves = {}
    for column, title in titles.items():
        if column in rounds:
            curves[column] = numbers(rounds[column], 100 if "%" in title else 1)
    return {"round": numbers(rounds["round"]) if len(rounds) else [], "curves": curves}


def _own_settings(experiment: Experiment, shared: Mapping[str, object]) -> dict[str, str]:
    """The settings of a run that not all runs share."""
    settings = comparable_settings(experiment)
    return {key: value_text(value) for key, value in settings.items() if key not in shared}


def _result(row: Mapping[str, Any], rule: str, metric: str) -> list[float | None]:
    """[the primary metric in percent, the round] under a selection rule."""
    percent = 100 * float(row[f"{rule}_target_{metric}"])
    return numbers([percent, row[f"{rule}_round"]])


def _by_run(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    if frame.empty:
        return {}
    return {str(run): rows for run, rows in frame.groupby("run", sort=False)}


def client_data(frame: pd.DataFrame, metrics: list[str]) -> Json:
    """A run's clients: each metric over rounds, the messages with their bytes by record, and what failed.

    Of very many clients the metrics are means over each domain's.
    """
    frame, key, _ = client_key(frame)
    drawn = [column for column in metrics if frame[column].notna().any()]
    means = frame.groupby([key, "round"])[drawn].mean()
    sizes = [column for column in frame if column.startswith("bytes_") and frame[column].notna().any()]
    messages = frame.groupby("client").agg(messages=("round", "size"), **{name: (name, "sum") for name in sizes})
    failed = frame[frame["status"].astype(str) != "ok"]
    return {
        "clients": {column: _lines(means[column]) for column in drawn},
        "messages": [
            list(messages),
            *([str(client), *numbers(row)] for client, row in zip(messages.index, messages.to_numpy())),
        ],
        "failures": [f"round {row.round}: {row.client}: {row.status}" for row in failed.itertuples()],
    }


def detail_data(frame: pd.DataFrame) -> Json:
    """{quantity: {client or group of layers: means over rounds}} of what a run has recorded layer by layer."""
    frame = frame.assign(
        client=frame["client"].fillna("server").astype(str), group=frame["name"].fillna("").map(layer_group)
    )
    quantities = {}
    for quantity, rows in frame.groupby("quantity", sort=False):
        lines: Json = {}
        for key in ("client", "group") if rows["group"].any() else ("client",):
            lines |= _lines(rows.groupby([key, "round"], sort=False)["value"].mean())
        quantities[str(quantity)] = lines
    return quantities


def _lines(values: pd.Series) -> dict[str, list[list[float | None]]]:
    """{name: [rounds, values]} of values whose index holds names and rounds."""
    lines = {}
    for name, line in values.groupby(level=0, sort=False):
        lines[str(name)] = [numbers(line.index.get_level_values(1)), numbers(line)]
    return lines


def confusion(runs: Runs, run: str, select: str) -> Json:
    """Classes, and for each class the images that were taken for each class; empty without kept predictions."""
    try:
        predictions = read_predictions(run_folder(runs, run), select)
    except UserError:
        return {}
    if len(predictions.classes) > MOST_CLASSES:
        return {}
    return {"classes": predictions.classes, "matrix": confusion_matrix(predictions).tolist()}


def recipe(environment: Mapping[str, Any]) -> dict[str, str]:
    """{slot and part: its fields} as the run has recorded them."""
    texts = {}
    for part, fields in environment.get("recipe", {}).items():
        texts[part] = ", ".join(f"{name} = {value_text(value)}" for name, value in fields.items())
    return texts
