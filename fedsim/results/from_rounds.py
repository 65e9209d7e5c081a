"""What tables of finished runs take from rounds.csv: rounds that are selected again, and rounds without a client.

Earlier versions of fedsim compared scores to their last bit, which depends on the order of a sum. They could therefore
select a later one of several rounds with equal scores. The files of such a run (summary.csv, best.safetensors, the
kept predictions) stay as they are; tables show the first of the equal rounds, and a note says so.
"""

import csv
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from fedsim.experiment import Experiment
from fedsim.results.selection import VALIDATED, competing, first_best, validation_column
from fedsim.results.statistics import comparable
from fedsim.tasks import task_in

Rows = list[dict[str, str]]
NAMED_RUNS = 3


def trained_rounds(run: Path) -> Rows:
    """The rows of rounds.csv from round 1 on, as text; an incomplete last line and an unreadable file are left out."""
    file = run / "rounds.csv"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    rows = [row for row in rows if (row.get("round") or "").isdecimal() and int(row["round"]) >= 1]
    return sorted(rows, key=lambda row: int(row["round"]))


def select_again(
    summary: pd.DataFrame, rounds: Mapping[str, Rows], experiments: Mapping[str, Experiment]
) -> tuple[pd.DataFrame, dict[str, str]]:
    """(summary with the first of equal rounds, {run: `19 instead of 17`} where `best_validation` is another round)."""
    summary, changed = summary.copy(), {}
    for index, recorded in zip(summary.index, summary.to_dict("records")):
        rows = rounds.get(recorded["run"]) or []
        metric = task_in(rows[0]).metric if rows else ""
        for rule in ("best_validation", "oracle") if rows else ():
            oracle = f"target_{metric}"
            column = oracle if rule == "oracle" else validation_column(experiments[recorded["run"]], metric)
            then = recorded.get(f"{rule}_round")
            row = None if pd.isna(then) else _first_of_equals(rows, column, int(then))
            if row is None:
                continue
            summary.loc[index, f"{rule}_round"] = int(row["round"])
            for name in (f"target_{metric}", f"mean_validation_{metric}"):
                summary.loc[index, f"{rule}_{name}"] = _number(row.get(name))
            if rule == "best_validation":
                changed[recorded["run"]] = f"{row['round']} instead of {int(then)}"
    return summary, changed


def _first_of_equals(rows: Rows, column: str, then: int) -> dict[str, str] | None:
    """The first of the rows that are equal to round `then`; None when that is the first itself, or not the best."""
    scores = np.array([_number(row.get(column)) for row in rows])
    if not column.startswith("target_") and VALIDATED in rows[0]:
        scores = competing(scores, [_number(row[VALIDATED]) for row in rows], column)
    if np.isnan(scores).all():
        return None
    best = first_best(scores)
    recorded = [number for number, row in enumerate(rows) if int(row["round"]) == then]
    if not recorded or recorded[0] == best or comparable(scores[recorded[0]]) != comparable(scores[best]):
        return None
    return rows[best]


def _number(text: str | None) -> float:
    try:
        return float(text) if text else float("nan")
    except ValueError:
        return float("nan")


def failed_rounds(rounds: Mapping[str, Rows]) -> dict[str, int]:
    """{run: the number of its rounds in which a client failed}, where there are any."""
    counts = {run: sum(_number(row.get("failed")) > 0 for row in rows) for run, rows in rounds.items()}
    return {run: count for run, count in counts.items() if count}


def failed_notes(failed: Mapping[str, int]) -> list[str]:
    """A note on the runs in which clients failed, so that rounds rest on fewer of them."""
    if not failed:
        return []
    named = [f"{run} ({count} round{'s' if count > 1 else ''})" for run, count in list(failed.items())[:NAMED_RUNS]]
    more = f" and {len(failed) - NAMED_RUNS} more runs" if len(failed) > NAMED_RUNS else ""
    return [f"Clients failed, and rounds rest on the others, in {', '.join(named)}{more}."]


def again_notes(changed: Mapping[str, str]) -> list[str]:
    """A note on the runs whose files are of another round than the table."""
    if not changed:
        return []
    named = [f"{run} (round {text})" for run, text in list(changed.items())[:NAMED_RUNS]]
    more = f" and {len(changed) - NAMED_RUNS} more" if len(changed) > NAMED_RUNS else ""
    return [
        f"{len(changed)} run(s) of an earlier version of fedsim, which chose between rounds of equal validation by the "
        f"last bit of a sum, count with the first of these rounds: {', '.join(named)}{more}. Their summary.csv, "
        "best.safetensors and kept predictions, from which other metrics are computed, are of the other round."
    ]
