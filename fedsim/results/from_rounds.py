"""What tables of finished runs take from rounds.csv: rounds that are selected again, and rounds without a client.

Earlier versions of fedsim compared scores to their last bit, which depends on the order of a sum. They could therefore
select a later one of several rounds with equal scores. The files of such a run (summary.csv, best.safetensors, the
kept predictions) stay as they are; tables show the first of the equal rounds, and a note says so.
"""

import csv
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from fedsim.common.tasks import task_in
from fedsim.results.selection import REPLIES, VALIDATED, first_best, validation_column
from fedsim.results.statistics import comparable
from fedsim.settings.experiment import Experiment

Rows = list[dict[str, str]]
NAMED_RUNS = 3


def trained_rounds(run: Path) -> Rows:
    """The rows of rounds.csv from round 1 on, as text; an incomplete last line and an unreadable file are left out."""
    file = run / "rounds.csv"
    text = file.read_text(encoding="utf-8-sig") if file.is_file() else ""
    table = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    rows = [row for row in table if (row.get("round") or "").isdecimal() and int(row["round"]) >= 1]
    return sorted(rows, key=lambda row: int(row["round"]))


def select_again(
    summary: pd.DataFrame, rounds: Mapping[str, Rows], experiments: Mapping[str, Experiment]
) -> tuple[pd.DataFrame, dict[str, str]]:
    """(summary with the first of equal rounds, {run: `19 instead of 17`} where `best_validation` is another round).

    Without any round that a reply made, a run has no result. A run of this version is not summarized then.
    """
    summary, changed = summary.copy(), {}
    for index, recorded in zip(summary.index, summary.to_dict("records")):
        rows = rounds.get(recorded["run"]) or []
        metric = task_in(rows[0]).metric if rows else ""
        if rows and not any(map(_made, rows)):
            gone = [name for name in summary if name.endswith(f"_target_{metric}")]
            summary.loc[index, gone] = math.nan
            continue
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
    """The first of the rows that are equal to round `then`, or the best one when no reply made that round.

    None when that is the first itself, or not the best.
    """
    unmade = any(int(row["round"]) == then and not _made(row) for row in rows)
    rows = [row for row in rows if _made(row)]
    scores = np.array([_number(row.get(column)) for row in rows])
    if np.isnan(scores).all():
        return None
    best = first_best(scores)
    if unmade:
        return rows[best]
    recorded = [number for number, row in enumerate(rows) if int(row["round"]) == then]
    if not recorded or recorded[0] == best or comparable(scores[recorded[0]]) != comparable(scores[best]):
        return None
    return rows[best]


def _made(row: Mapping[str, str]) -> bool:
    return _number(row.get(REPLIES)) != 0


def unmade_rounds(rounds: Mapping[str, Rows]) -> dict[str, str]:
    """{run: `2 of 3`} where no client's reply was accepted in so many of its rounds."""
    counts = {run: (sum(not _made(row) for row in rows), len(rows)) for run, rows in rounds.items()}
    return {run: f"{none} of {all}" for run, (none, all) in counts.items() if none}


def _number(text: str | None) -> float:
    try:
        return float(text) if text else float("nan")
    except ValueError:
        return float("nan")


def failed_rounds(rounds: Mapping[str, Rows]) -> dict[str, int]:
    """{run: the number of its rounds in which a client failed and others did not}, where there are any."""
    counts = {run: sum(_number(row.get("failed")) > 0 and _made(row) for row in rows) for run, rows in rounds.items()}
    return {run: count for run, count in counts.items() if count}


def thin_rounds(rounds: Mapping[str, Rows], summary: pd.DataFrame) -> dict[str, str]:
    """{run: `2 of 3`} where fewer clients validated in the selected round than in another round of the run.

    A mean without the client of a hard domain is greater without a better model. In rounds that do not record the
    number, while the run stopped at every failure, all clients that trained validated.
    """
    chosen = dict(zip(summary["run"], summary["best_validation_round"])) if "best_validation_round" in summary else {}
    thin = {}
    for run, rows in rounds.items():
        if not rows or VALIDATED not in rows[0]:
            continue
        counts = {int(row["round"]): _number(row[VALIDATED] or row.get("clients")) for row in rows}
        most = max((count for count in counts.values() if not math.isnan(count)), default=math.nan)
        own = counts.get(chosen.get(run, -1), math.nan)
        if own < most:
            thin[run] = f"{own:.0f} of {most:.0f}"
    return thin


def _named(texts: Mapping[str, str]) -> str:
    """`run (text), ...` of the first runs, and how many more there are."""
    named = [f"{run} ({text})" for run, text in list(texts.items())[:NAMED_RUNS]]
    more = len(texts) - NAMED_RUNS
    return ", ".join(named) + (f" and {more} more run{'s' if more > 1 else ''}" if more > 0 else "")


def thin_notes(thin: Mapping[str, str]) -> list[str]:
    """A note on the runs whose selected round rests on the validation of fewer clients than other rounds."""
    if not thin:
        return []
    named = _named({run: f"{text} clients" for run, text in thin.items()})
    return [f"The selected round was validated by fewer clients than other rounds in {named}."]


def failed_notes(failed: Mapping[str, int]) -> list[str]:
    """A note on the runs in which clients failed, so that rounds rest on fewer of them."""
    if not failed:
        return []
    named = _named({run: f"{count} round{'s' if count > 1 else ''}" for run, count in failed.items()})
    return [f"Clients failed, and rounds rest on the others, in {named}."]


def unmade_notes(unmade: Mapping[str, str]) -> list[str]:
    """A note on the runs with rounds that no reply made."""
    if not unmade:
        return []
    named = _named({run: f"{text} rounds" for run, text in unmade.items()})
    return [
        f"No client's reply was accepted in rounds of {named}: they left the model as it was, and are not selected."
    ]


def again_notes(changed: Mapping[str, str]) -> list[str]:
    """A note on the runs whose files are of another round than the table."""
    if not changed:
        return []
    named = _named({run: f"round {text}" for run, text in changed.items()})
    runs = "1 run" if len(changed) == 1 else f"{len(changed)} runs"
    return [
        f"In {runs} of an earlier version of fedsim the first of several equal rounds that a reply made counts here, "
        f"and the files are of another one: {named}."
    ]
