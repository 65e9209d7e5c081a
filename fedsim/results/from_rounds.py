"""What tables of finished runs take from rounds.csv: rounds that are selected again, and rounds without a client.

Earlier versions of fedsim compared scores to their last bit, which depends on the order of a sum. They could therefore
select a later one of several rounds with equal scores. The files of such a run (summary.csv, best.safetensors, the
kept predictions) stay as they are; tables show the first of the equal rounds, and a note says so.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from fedsim.common.tasks import task_in
from fedsim.results.record_files import text_rows
from fedsim.results.selection import REPLIES, VALIDATED, first_best, validation_column
from fedsim.results.statistics import comparable
from fedsim.settings.experiment import Experiment

Rows = list[dict[str, str]]


def trained_rounds(run: Path) -> Rows:
    """The rows of rounds.csv from round 1 on, as text; an incomplete last line and an unreadable file are left out."""
    rows = [row for row in text_rows(run / "rounds.csv") if (row.get("round") or "").isdecimal()]
    return sorted((row for row in rows if int(row["round"]) >= 1), key=lambda row: int(row["round"]))


def select_again(
    summary: pd.DataFrame,
    rounds: Mapping[str, Rows],
    experiments: Mapping[str, Experiment],
) -> tuple[pd.DataFrame, dict[str, dict[str, str]]]:
    """(summary with the first of equal rounds, {run: {`reselected`: text}} where `best_validation` is another round).

    Without any round that a reply made, a run has no result. A run of this version is not summarized then.
    """
    summary, changed = summary.copy(), {}
    for index, recorded in zip(summary.index, summary.to_dict("records")):
        run = recorded["run"]
        rows = rounds.get(run)
        if not rows:
            continue
        metric = task_in(rows[0]).metric
        if not any(map(_made, rows)):
            results = [name for name in summary if name.endswith(f"_target_{metric}")]
            summary.loc[index, results] = math.nan
            continue
        validation = validation_column(experiments[run], metric)
        for rule, column in {"best_validation": validation, "oracle": f"target_{metric}"}.items():
            before = recorded.get(f"{rule}_round")
            row = None if pd.isna(before) else _first_of_equals(rows, column, int(before))
            if row is None:
                continue
            for name, value in _results(row, metric).items():
                summary.loc[index, f"{rule}_{name}"] = value
            if rule == "best_validation":
                changed[run] = {"reselected": f"round {row['round']} instead of {int(before)}"}
    return summary, changed


def _results(row: Mapping[str, str], metric: str) -> dict[str, float]:
    """What a summary has of a selected round."""
    return {
        "round": int(row["round"]),
        f"target_{metric}": _number(row.get(f"target_{metric}")),
        f"mean_validation_{metric}": _number(row.get(f"mean_validation_{metric}")),
    }


def _first_of_equals(rows: Rows, column: str, number: int) -> dict[str, str] | None:
    """The first of the rows that are equal to the round of this number, or the best one when no reply made that round.

    None when that is the first itself, or not the best.
    """
    made = [row for row in rows if _made(row)]
    selected = next((row for row in rows if int(row["round"]) == number), None)
    scores = np.array([_number(row.get(column)) for row in made])
    if selected is None or np.isnan(scores).all():
        return None
    place = first_best(scores)
    best = made[place]
    if not _made(selected):
        return best
    is_equal = comparable(_number(selected.get(column))) == comparable(scores[place])
    return best if is_equal and best is not selected else None


def _made(row: Mapping[str, str]) -> bool:
    return _number(row.get(REPLIES)) != 0


def _number(text: str | None) -> float:
    try:
        return float(text) if text else float("nan")
    except ValueError:
        return float("nan")


def remarks_on(rows: Rows, chosen: float) -> dict[str, str]:
    """What is to be said of a run's rounds, by kind; chosen: the round of `best_validation`, NaN where there is none.

    failed: `2 rounds` in which a client failed and others did not.
    unmade: `2 of 3 rounds` in which no client's reply was accepted.
    thin: `2 of 3 clients` where fewer clients validated in the selected round than in another one. A mean without the
    client of a hard domain is greater without a better model. In rounds that do not record the number, while the run
    stopped at every failure, all clients that trained validated.
    """
    failed = sum(_number(row.get("failed")) > 0 and _made(row) for row in rows)
    unmade = sum(not _made(row) for row in rows)
    validated = {}  # {round: the clients that validated in it}
    for row in rows:
        if VALIDATED in row:
            validated[int(row["round"])] = _number(row[VALIDATED] or row.get("clients"))
    selected = validated.get(int(chosen), math.nan) if chosen >= 0 else math.nan
    most = max((count for count in validated.values() if not math.isnan(count)), default=math.nan)
    remarks = {}
    if failed:
        remarks["failed"] = f"{failed} round{'s' if failed > 1 else ''}"
    if unmade:
        remarks["unmade"] = f"{unmade} of {len(rows)} rounds"
    if selected < most:
        remarks["thin"] = f"{selected:.0f} of {most:.0f} clients"
    return remarks
