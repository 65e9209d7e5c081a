"""Says when the kept best model of a run is not final, or not of the round that tables report (see `select_again`)."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from fedsim.common.errors import UserError
from fedsim.common.tasks import task_in
from fedsim.records.reading import read_settings
from fedsim.records.record_files import read_record
from fedsim.records.selection import select, validation_column


def unfinished(run: Path) -> str:
    """A text when the run has not finished, so that a later round may still replace its best model; else empty."""
    rounds = read_record(run / "rounds.csv")
    if (run / "summary.csv").is_file() or rounds.empty:
        return ""
    planned = read_settings(run).train.rounds
    return f"the run has not finished: this is the best of {rounds['round'].max()} of {planned} rounds"


def other_round(run: Path) -> str:
    """A text when best.safetensors of a finished run is not of the round that tables report; else empty."""
    kept = _round_of(run / "best.safetensors")
    rounds = read_record(run / "rounds.csv")
    if kept is None or not (run / "summary.csv").is_file() or rounds.empty:
        return ""
    try:
        chosen = int(
            select(rounds, "best_validation", validation_column(read_settings(run), task_in(rounds).metric))["round"]
        )
    except UserError:  # all values are NaN, or the column is of an older version
        return ""
    if chosen == kept:
        return ""
    return (
        f"best.safetensors and summary.csv are of round {kept}, chosen by an earlier version of fedsim; tables report "
        f"round {chosen}, the first with this validation"
    )


def _round_of(file: Path) -> int | None:
    try:
        with safe_open(file, framework="numpy") as content:
            return int((content.metadata() or {})["round"])
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
