"""The numbers behind a report's charts and behind the page of each run, as one table of plain values for JSON.

They are of the same `Runs` and `Comparison` as the tables: nothing is read or selected a second time.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from fedsim.common.errors import UserError
from fedsim.common.tasks import task_of
from fedsim.results.client_rows import client_key, client_metrics, layer_group
from fedsim.results.comparison import Comparison, shown_label
from fedsim.results.differences import comparable_settings, value_text
from fedsim.results.metrics import confusion_matrix
from fedsim.results.notes import missing_cells
from fedsim.results.predictions import read_predictions
from fedsim.results.reading import Runs, run_environment, run_folder
from fedsim.results.reproduce import command_line
from fedsim.results.selection import RULES
from fedsim.results.statistics import grid_of, interval, whole_run_costs

Json = dict[str, Any]
MOST_CLASSES = 100  # a matrix with more would be most of the page
CURVES = {"target_{}": "target {} (%)", "mean_validation_{}": "source validation {} (%)", "train_loss": "training loss"}


def numbers(values: Iterable[float], factor: float = 1.0) -> list[float | None]:
    """Values for JSON, with five digits that count; None for what is missing or infinite."""
    return [float(f"{factor * value:.5g}") if np.isfinite(value) else None for value in map(float, values)]


def chart_data(runs: Runs, comparison: Comparison, groups: Mapping[str, str], pages: Mapping[str, int]) -> Json:
    """What the charts of one experiment show; pages: the place of each of its runs among the report's runs."""
    table, methods = comparison.table, comparison.methods
    rounds = runs.rounds.assign(label=runs.rounds["run"].map(comparison.labels))
    costs = whole_run_costs(rounds).join(methods.set_index("label")["steps"])
    base = grid_of(table, comparison.baseline) if comparison.baseline else None
    ours: list[Json] = []
    for row in methods.to_dict("records"):
        label, grid = row["label"], grid_of(table, row["label"])
        cells = comparison.cells[comparison.cells["label"] == label]
        own = table[table["label"] == label].sort_values(["target", "seed"])
        ours.append(
            {
                "label": label,
                "shown": shown_label(pd.Series(row)),
                "group": groups.get(row["method"], ""),
                "ranked": row["group"],
                "cells": {cell.target: numbers([cell.mean, cell.std], 100) for cell in cells.itertuples()},
                "differences": {} if base is None or label == comparison.baseline else _differences(grid - base),
                "costs": dict(zip(costs, numbers(costs.loc[label]))) if label in costs.index else {},
                "runs": [[target, pages[run]] for target, run in zip(own["target"], own["run"])],
            }
        )
    return {
        "metric": comparison.measure.title,
        "rule": comparison.rule,
        "baseline": comparison.baseline,
        "seeds": comparison.most_seeds,
        "targets": comparison.targets,
        "curves": list(curve_titles(runs.rounds).items()),
        "missing": missing_cells(table, comparison.targets),
        "methods": ours,
    }


def _differences(grid: pd.DataFrame) -> dict[str, list[float | None]]:
    """{target, and `average` over all: [mean difference in points, lower and upper bound of its interval, pairs]}."""
    cells = {"average": grid, **{target: grid[target] for target in grid}}
    values = {name: own.to_numpy(dtype=float).ravel() for name, own in cells.items()}
    known = {name: own[np.isfinite(own)] for name, own in values.items()}
    return {name: [*numbers(interval(own), 100), len(own)] for name, own in known.items() if len(own)}


def curve_titles(rounds: pd.DataFrame) -> dict[str, str]:
    """{column: title} of the columns of rounds.csv that are drawn and have values."""
    task = task_of(rounds)
    titles = {column.format(task.metric): title.format(task.title) for column, title in CURVES.items()}
    return {column: title for column, title in titles.items() if column in rounds and rounds[column].notna().any()}


def run_data(runs: Runs, comparison: Comparison, shared: Mapping[str, object]) -> list[Json]:
    """The page of each run, in the order of the summaries; shared: settings of all runs, which a page leaves out."""
    labels = comparison.labels
    rounds, clients, details = (_by_run(frame) for frame in (runs.rounds, runs.clients, runs.details))
    titles, metrics = curve_titles(runs.rounds), client_metrics(runs.clients)
    metric = task_of(runs.summary, "last_target_").metric
    found = []
    for row in runs.summary.to_dict("records"):
        run = row["run"]
        experiment, own = runs.comparable[run], rounds.get(run, runs.rounds.iloc[:0])
        scale = {column: 100 if "%" in title else 1 for column, title in titles.items()}
        found.append(
            {
                "run": run,
                "label": labels[run],
                "target": row["target"],
                "seed": int(row["seed"]),
                "results": {rule: _result(row, rule, metric) for rule in RULES},
                "round": numbers(own["round"]) if len(own) else [],
                "curves": {column: numbers(own[column], scale[column]) for column in titles if column in own},
                **(client_data(clients[run], metrics) if run in clients else {}),
                "details": detail_data(details[run]) if run in details else {},
                "confusion": confusion(runs, run, comparison.select),
                "settings": {
                    key: value_text(value)
                    for key, value in comparable_settings(experiment).items()
                    if key not in shared
                },
                "recipe": recipe(run_environment(runs, run)),
                "command": command_line(experiment, run_folder(runs, run) / "experiment.toml"),
            }
        )
    return found


def _result(row: Mapping[str, Any], rule: str, metric: str) -> list[float | None]:
    return [*numbers([row[f"{rule}_target_{metric}"]], 100), *numbers([row[f"{rule}_round"]])]


def _by_run(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return {str(run): own for run, own in frame.groupby("run", sort=False)} if len(frame) else {}


def client_data(frame: pd.DataFrame, metrics: list[str]) -> Json:
    """A run's clients: each metric over rounds, the messages with their bytes by record, and what failed.

    Of very many clients the metrics are means over each domain's.
    """
    frame, key, _ = client_key(frame)
    drawn = [column for column in metrics if frame[column].notna().any()]
    means = frame.groupby([key, "round"])[drawn].mean()
    series = {
        column: {str(client): _line(own[column].droplevel(0)) for client, own in means.groupby(level=0)}
        for column in drawn
    }
    sizes = [column for column in frame if column.startswith("bytes_") and frame[column].notna().any()]
    sums = frame.groupby("client").agg(messages=("round", "size"), **{name: (name, "sum") for name in sizes})
    failed = frame[frame["status"].astype(str) != "ok"]
    return {
        "clients": series,
        "messages": [list(sums), *([str(client), *numbers(own)] for client, own in zip(sums.index, sums.to_numpy()))],
        "failures": [f"round {row.round}: {row.client}: {row.status}" for row in failed.itertuples()],
    }


def detail_data(frame: pd.DataFrame) -> Json:
    """{quantity: {client or group of layers: means over rounds}} of what a run has recorded layer by layer."""
    frame = frame.assign(
        client=frame["client"].fillna("server").astype(str), group=frame["name"].fillna("").map(layer_group)
    )
    found = {}
    for quantity, own in frame.groupby("quantity", sort=False):
        keys = ["client"] + ["group"] * bool(own["group"].any())
        means = [own.groupby([key, "round"], sort=False)["value"].mean() for key in keys]
        found[str(quantity)] = {
            str(name): _line(line.droplevel(0)) for one in means for name, line in one.groupby(level=0, sort=False)
        }
    return found


def _line(values: pd.Series) -> list[list[float | None]]:
    return [numbers(values.index), numbers(values)]


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
    return {
        part: ", ".join(f"{name} = {value_text(value)}" for name, value in fields.items())
        for part, fields in environment.get("recipe", {}).items()
    }
