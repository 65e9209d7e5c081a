"""The numbers behind a report's charts and behind the page of each run, as one table of plain values for JSON.

They are of the same `Runs` and `Comparison` as the tables: nothing is read or selected a second time.
The page of a run also has the command line that repeats it, which is made from its resolved settings alone.
"""

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedsim.analysis.comparison import Comparison, shown_label, without_exchange
from fedsim.analysis.figure_style import places
from fedsim.analysis.metrics import confusion_matrix
from fedsim.analysis.notes import missing_cells
from fedsim.analysis.statistics import grid_of, interval, whole_run_costs
from fedsim.common.errors import UserError
from fedsim.common.tasks import BY_METRIC, task_of
from fedsim.records.client_rows import client_key, client_metrics, with_layer_groups
from fedsim.records.differences import MACHINE_KEYS, comparable_settings, flatten, value_text
from fedsim.records.predictions import read_predictions
from fedsim.records.reading import Runs, run_environment, run_folder
from fedsim.records.selection import RULES
from fedsim.settings.experiment import Experiment, read_experiment

Json = dict[str, Any]
Numbers = list[float | None]  # of JSON, which has no NaN
Pages = Mapping[str, int]  # the place of each run among the report's runs
MOST_CLASSES = 100  # a matrix with more would be most of the page
# Settings that have an option of their own, and those that do not change what a run computes.
SHORT = ("method.name", "run.target", "run.seed", "run.output", "run.callbacks", "run.tensorboard", "name")
CURVES = {"target_{}": "target {}", "mean_validation_{}": "source validation {}", "train_loss": "training loss"}


def numbers(values: Iterable[float], factor: float = 1.0) -> Numbers:
    """Values for JSON, with five digits that count; None for what is missing or infinite."""
    rounded: Numbers = []
    for value in map(float, values):
        number = None
        if np.isfinite(value):
            number = float(f"{factor * value:.5g}")
        rounded.append(number)
    return rounded


def chart_data(runs: Runs, comparison: Comparison, groups: Mapping[str, str], pages: Pages) -> Json:
    """What the charts of one experiment show; groups: what each method changes."""
    labels = runs.rounds["run"].map(comparison.labels)
    rounds = runs.rounds.assign(label=labels)
    steps = comparison.methods.set_index("label")["steps"]
    exchanged = without_exchange(rounds, comparison.methods)
    costs = whole_run_costs(exchanged).join(steps)
    methods = []
    style_of = places(comparison.labels.values())
    for method in comparison.methods.to_dict("records"):
        label = method["label"]
        shown = {
            "label": label,
            "place": style_of[label],
            "shown": shown_label(method),
            "group": groups.get(method["method"], ""),
            "ranked": method["group"],
            "cells": _cells(comparison, label),
            "differences": _differences(comparison, label),
            "costs": {},
            "runs": _pages(comparison, label, pages),
        }
        if label in costs.index:
            values = numbers(costs.loc[label])
            shown["costs"] = dict(zip(costs, values))
        methods.append(shown)
    return {
        "metric": comparison.measure.heading,
        "unit": " %" if comparison.measure.is_fraction else "",
        "less": comparison.measure.less_is_better,
        "rule": comparison.rule,
        "baseline": comparison.baseline,
        "seeds": comparison.most_seeds,
        "targets": comparison.targets,
        "curves": list(curve_titles(runs.rounds).items()),
        "missing": missing_cells(comparison.table, comparison.defined),
        "methods": methods,
    }


def _cells(comparison: Comparison, label: str) -> dict[str, Numbers]:
    """{target: [mean, deviation], fractions in percent} of one method."""
    cells = comparison.cells
    cells = cells[cells["label"] == label]
    percents = {}
    for cell in cells.itertuples():
        fractions = [cell.mean, cell.std]
        percents[cell.target] = numbers(fractions, comparison.measure.factor)
    return percents


def _pages(comparison: Comparison, label: str, pages: Pages) -> list[list[Any]]:
    """[target, place of its page] of every run of one method."""
    table = comparison.table
    runs = table[table["label"] == label]
    runs = runs.sort_values(["target", "seed"])
    places = runs["run"].map(pages)
    rows = zip(runs["target"], places.tolist())
    return [list(row) for row in rows]


def _differences(comparison: Comparison, label: str) -> dict[str, Numbers]:
    """{target, and `average` over all: [mean difference in points, lower and upper bound of its interval, pairs]}."""
    if comparison.baseline in ("", label):
        return {}
    of_baseline = grid_of(comparison.table, comparison.baseline)
    grid = grid_of(comparison.table, label) - of_baseline
    differences = {}
    for name in ("average", *grid):
        cells = grid if name == "average" else grid[name]
        values = cells.to_numpy(dtype=float).ravel()
        values = values[np.isfinite(values)]
        if len(values):
            bounds = numbers(interval(values), comparison.measure.factor)
            differences[name] = [*bounds, len(values)]
    return differences


def curve_titles(rounds: pd.DataFrame) -> dict[str, str]:
    """{column: title} of the columns of rounds.csv that are drawn and have values."""
    task = task_of(rounds)
    heading = f"{task.title} (%)" if task.is_fraction else task.title
    titles = {}
    for column, title in CURVES.items():
        name = column.format(task.metric)
        if _has_values(rounds, name):
            titles[name] = title.format(heading)
    return titles


def _has_values(frame: pd.DataFrame, column: str) -> bool:
    if column not in frame:
        return False
    return bool(frame[column].notna().any())


def run_data(runs: Runs, comparison: Comparison, shared: Mapping[str, object]) -> list[Json]:
    """The page of each run, in the order of the summaries; shared: settings of all runs, which a page leaves out."""
    rounds = _by_run(runs.rounds)
    clients = _by_run(runs.clients)
    details = _by_run(runs.details)
    metrics = client_metrics(runs.clients)
    metric = task_of(runs.summary, "last_target_").metric
    titles = curve_titles(runs.rounds)
    no_rounds = runs.rounds.iloc[:0]
    pages = []
    for summary in runs.summary.to_dict("records"):
        run = summary["run"]
        experiment = runs.comparable[run]
        folder = run_folder(runs, run).relative_to(runs.folder)
        settings = runs.source / folder / "experiment.toml"
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
            "command": command_line(experiment, settings),
        }
        pages.append(page)
    return pages


def _curves(rounds: pd.DataFrame, titles: Mapping[str, str]) -> Json:
    """The rounds of a run, and its curves; those whose title has a percent sign are in percent."""
    curves = {}
    for column, title in titles.items():
        if column in rounds:
            factor = 100 if "%" in title else 1
            curves[column] = numbers(rounds[column], factor)
    places = numbers(rounds["round"]) if len(rounds) else []
    return {"round": places, "curves": curves}


def _own_settings(experiment: Experiment, shared: Mapping[str, object]) -> dict[str, str]:
    """The settings of a run that not all runs share."""
    texts = {}
    for key, value in comparable_settings(experiment).items():
        if key not in shared:
            texts[key] = value_text(value)
    return texts


def _result(row: Mapping[str, Any], rule: str, metric: str) -> list[Any]:
    """[the primary metric as the table prints it, the round] under a selection rule."""
    score = float(row[f"{rule}_target_{metric}"])
    return [BY_METRIC[metric].number(score), *numbers([row[f"{rule}_round"]])]


def _by_run(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    if frame.empty:
        return {}
    frames = {}
    for run, rows in frame.groupby("run", sort=False):
        frames[str(run)] = rows
    return frames


def client_data(frame: pd.DataFrame, metrics: list[str]) -> Json:
    """A run's clients: each metric over rounds, the messages with their bytes by record, and what failed.

    Of very many clients the metrics are means over each domain's.
    """
    frame, key, _ = client_key(frame)
    drawn = [column for column in metrics if _has_values(frame, column)]
    by_round = frame.groupby([key, "round"])
    means = by_round[drawn].mean()
    status = frame["status"].astype(str)
    failed = frame[status != "ok"]
    return {
        "clients": {column: _lines(means[column]) for column in drawn},
        "messages": _messages(frame),
        "failures": [f"round {row.round}: {row.client}: {row.status}" for row in failed.itertuples()],
    }


def _messages(frame: pd.DataFrame) -> list[list[Any]]:
    """Return the heads, then a row for each client: its messages, and the bytes of each record."""
    by_client = frame.groupby("client")
    columns = {"messages": by_client.size()}
    for column in frame:
        if column.startswith("bytes_") and _has_values(frame, column):
            columns[column] = by_client[column].sum()
    table = pd.DataFrame(columns)
    rows = [list(table)]
    for client, values in zip(table.index, table.to_numpy()):
        rows.append([str(client), *numbers(values)])
    return rows


def detail_data(frame: pd.DataFrame) -> Json:
    """{quantity: {client or group of layers: means over rounds}} of what a run has recorded layer by layer."""
    quantities = {}
    for quantity, rows in with_layer_groups(frame).groupby("quantity", sort=False):
        keys = ["client", "group"] if rows["group"].any() else ["client"]
        lines: Json = {}
        for key in keys:
            groups = rows.groupby([key, "round"], sort=False)
            lines |= _lines(groups["value"].mean())
        quantities[str(quantity)] = lines
    return quantities


def _lines(values: pd.Series) -> dict[str, list[Numbers]]:
    """{name: [rounds, values]} of values whose index holds names and rounds."""
    lines = {}
    for name, line in values.groupby(level=0, sort=False):
        rounds = line.index.get_level_values(1)
        lines[str(name)] = [numbers(rounds), numbers(line)]
    return lines


def confusion(runs: Runs, run: str, select: str) -> Json:
    """Classes, and for each class the images that were taken for each class; empty without kept predictions."""
    try:
        predictions = read_predictions(run_folder(runs, run), select)
    except UserError:
        return {}
    if len(predictions.classes) > MOST_CLASSES:
        return {}
    matrix = confusion_matrix(predictions)
    return {"classes": predictions.classes, "matrix": matrix.tolist()}


def recipe(environment: Mapping[str, Any]) -> dict[str, str]:
    """{slot and part: its fields} as the run has recorded them."""
    texts = {}
    for part, fields in environment.get("recipe", {}).items():
        values = []
        for name, value in fields.items():
            values.append(f"{name} = {value_text(value)}")
        texts[part] = ", ".join(values)
    return texts


def command_line(experiment: Experiment, file: Path) -> str:
    """`fedsim run CONFIG --method M --target D --seed S --set key=value ...`.

    CONFIG is the shipped experiment of the run's name, and `--set` gives what differs from it. When there is no such
    experiment, or when it sets something that an override cannot undo, CONFIG is `file`, the run's own experiment.toml.
    The folder of the data is left out, because it differs between machines. For clients with an app's own code, which
    no record has, it is a sentence.
    """
    if experiment.app is not None:
        return "# start the Flower app again: the code of its clients is in no record"
    run = experiment.run
    options = ["--method", experiment.method_name, "--target", run.target, "--seed", str(run.seed)]
    overrides = _overrides(experiment)
    if overrides is None:
        return shlex.join(["fedsim", "run", file.as_posix(), *options])
    for key, value in overrides.items():
        options += ["--set", f"{key}={override_text(value)}"]
    return shlex.join(["fedsim", "run", experiment.name, *options])


def override_text(value: Any) -> str:
    """A value as it is written in an override: plain words without quotes, everything else as TOML."""
    bare = isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w./-]*", value)
    if bare and value not in ("true", "false", "inf", "nan"):
        return value
    return json.dumps(value, ensure_ascii=False)


def _overrides(experiment: Experiment) -> dict[str, Any] | None:
    """Settings that differ from the experiment of the same name; None when overrides cannot express the run."""
    try:
        shipped = read_experiment(experiment.name)
    except UserError:
        return None
    before = flatten(shipped.model_dump())
    after = flatten(experiment.model_dump())
    for key in (*SHORT, *MACHINE_KEYS):
        before.pop(key, None)
        after.pop(key, None)
    if before.keys() - after.keys():
        return None
    changed = {}
    for key, value in after.items():
        if before.get(key) != value:
            changed[key] = value
    return changed
