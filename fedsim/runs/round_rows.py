"""The row of one round in rounds.csv, what a round is selected by, and whether any round was made."""

import math
import time
from collections.abc import Mapping
from pathlib import Path

from fedsim.common.errors import ClientFailedError
from fedsim.common.tasks import BY_METRIC, OF_CLASSES, SOURCE_TEST
from fedsim.common.values import Json, Row
from fedsim.records.columns import Columns
from fedsim.records.record_files import text_rows
from fedsim.records.selection import REPLIES, VALIDATED, upwards
from fedsim.settings.experiment import Experiment
from strategies.wire.round_notes import RoundNotes
from strategies.wire.target_site import TargetScore


def round_row(notes: RoundNotes, score: TargetScore, experiment: Experiment, metric: str, before: float) -> Row:
    """Returns the row of rounds.csv.

    metric: the task's primary one. before: the time at which the round before ended
    """
    rows = list(notes.clients.values())
    row = {
        "round": notes.round,
        "train_loss": mean_of_most(rows, "train_loss", "examples"),
        f"mean_validation_{metric}": mean(rows, f"validation_{metric}"),
        "mean_validation_loss": mean(rows, "validation_loss"),
        f"target_{metric}": score.value,
        "target_loss": score.loss,
        "clients": sum("weight" in row for row in rows),
        "failed": sum(row["status"] != "ok" for row in rows),
    }
    for column in ("images", "steps", "bytes_down", "bytes_up", "train_seconds"):
        row[column] = total(rows, column)
    row["evaluation_seconds"] = sum(client.get("evaluation_seconds", 0.0) for client in rows) + score.seconds
    row["aggregation_seconds"] = notes.aggregation_seconds
    row["round_seconds"] = time.perf_counter() - (notes.started if notes.round else before)
    for name in BY_METRIC[metric].further:
        row[f"mean_validation_{name}"] = mean(rows, f"validation_{name}")
    if experiment.data.source_test:
        row[f"mean_{SOURCE_TEST}{metric}"] = mean(rows, SOURCE_TEST + metric)
    return row | selection_columns(rows, experiment, metric)


def total(rows: list[Row], column: str) -> float | None:
    """Returns the sum of a column over the clients; None where one that counts does not say it, as in an app may be."""
    if any("weight" in row and column not in row for row in rows):
        return None
    return sum(row.get(column, 0) for row in rows)


def selection_columns(rows: list[Row], experiment: Experiment, metric: str) -> Row:
    """Returns the columns that say what selects a round, where this is not the validation of all clients."""
    train, run = experiment.train, experiment.run
    by = metric if run.select_by == "primary" else run.select_by
    start = "local_validation_" if run.select_on == "local" else "validation_"
    may_be_away = bool(train.availability or train.lost_replies)
    may_vary = (
        may_be_away
        or train.evaluate_clients != "all"
        or train.evaluate_every > 1
        or run.on_client_failure == "continue"
    )
    columns: Row = {}
    if may_vary or by in OF_CLASSES:  # a client with images of one class has no AUROC
        columns[VALIDATED] = sum(row.get(start + by) is not None for row in rows)
    if run.select_on == "local":
        columns[f"mean_{start}{metric}"] = mean(rows, start + metric)
    if by != metric:
        columns[f"mean_{start}{by}"] = mean(rows, start + by)
    return columns


def score_of(row: Mapping[str, Json], column: str) -> float:
    """Returns what a round is selected by, of which the greatest is the best.

    It is NaN without a validation, and where no client's reply made the round.
    """
    value = row.get(column)
    if value is None or row.get(REPLIES) == 0:
        return math.nan
    return upwards(float(value), column)


def refuse_unmade(folder: Path, rounds: Columns) -> None:
    """Raises ClientFailedError when no round of a run that came to its end was made, so that nobody ever trained."""
    trained = rounds.chosen(rounds["round"] >= 1)
    if trained.numbers(REPLIES).any():
        return
    failed = [row for row in text_rows(folder / "clients.csv") if row["status"] != "ok"]
    reason = ""
    if failed:
        first = failed[0]
        reason = f"; the first: client {first['client']!r}: {first['status']}"
    raise ClientFailedError(
        f"no round was made: no client's reply was accepted in {len(trained)} rounds, so that {folder} has no result"
        f"{reason}. Change the settings and choose another --output or name, or remove the folder"
    )


def mean_of_most(rows: list[Row], column: str, weight: str) -> float | None:
    """Returns the mean of a column, weighted by another; None where at most half of the clients that count have it."""
    counted = [row for row in rows if "weight" in row]
    having = sum(row.get(column) is not None for row in rows)
    return mean(rows, column, weight) if 2 * having > len(counted) else None


def mean(rows: list[Row], column: str, weight: str = "") -> float | None:
    """Returns the mean of a column over the rows that have it, weighted by another column or not; None without any."""
    with_value = [row for row in rows if row.get(column) is not None]
    if not with_value:
        return None
    values = [row[column] for row in with_value]
    counts = [row[weight] if weight else 1 for row in with_value]
    return sum(value * count for value, count in zip(values, counts, strict=True)) / sum(counts)
