"""Reads single record files of a run. A file that was cut off or changed by another program is named in the error."""

import csv
import io
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.common.errors import UserError
from fedsim.records.columns import Columns
from fedsim.records.readers import AGAIN, named, read_text
from fedsim.records.selection import RULES

if TYPE_CHECKING:
    import pandas as pd

# Names stay text even where they look like numbers: the domains of Rotated MNIST may be called 0, 15, 30.
TEXT_COLUMNS = (
    "experiment", "dataset", "backbone", "method", "label", "target", "validation_domain", "settings", "client",
    "domain", "status", "quantity", "name",
)  # fmt: skip
SUMMARY_KEYS = ("method", "target", "seed")
TRUTHS = {"True": 1.0, "False": 0.0}
NO_NUMBER = ("", "nan")
CHANGED = f"so that another program has changed it; {AGAIN}"


def parse_csv(text: str, where: str) -> "pd.DataFrame":
    """A record file's text as a frame with typed columns; an incomplete last line is left out."""
    import pandas as pd

    text = complete_lines(text)
    if not text:
        return pd.DataFrame()
    first_lines = text.splitlines()[:2]
    header, *first = csv.reader(first_lines)
    if first and len(first[0]) > len(header):  # pandas would take the first cells for names of the rows
        raise UserError(f"{where}: rows have more cells than columns, {CHANGED}")
    kinds = {column: str for column in header if column in TEXT_COLUMNS}
    try:
        return pd.read_csv(io.StringIO(text), dtype=kinds, keep_default_na=False, na_values=["", "nan"], **exact())
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{where}: not a readable record: {reason}; {AGAIN}") from None


@cache
def exact() -> dict[str, Any]:
    """Return the argument with which pandas reads numbers to the last digit.

    From 3.1 on it does so by default, and the argument that older versions need is deprecated.
    """
    import pandas as pd

    major, minor, *_ = pd.__version__.split(".")
    return {} if (int(major), int(minor)) >= (3, 1) else {"float_precision": "round_trip"}


def read_record(file: Path) -> "pd.DataFrame":
    """The complete rows of a record file, typed; empty without the file or without a complete line.

    Raises UserError when the file lacks the columns by which its rows are known, or a summary those of a rule of
    selection, and for text in place of numbers.
    """
    import pandas as pd

    if not file.is_file():
        return pd.DataFrame()
    with named(file, "the rows"):
        frame = parse_csv(read_text(file), str(file))
    if frame.empty:
        return frame
    check_columns(file, list(frame.columns))
    for column in frame:
        if column not in TEXT_COLUMNS and not _has_numbers(frame[column]):
            raise UserError(f"{file}: {column!r} has text in place of numbers, {CHANGED}")
    return frame


def read_columns(file: Path) -> Columns:
    """Return the complete rows of rounds.csv or summary.csv; no columns without the file or without a complete row.

    Raises UserError as `read_record` does.
    """
    rows = text_rows_of(file)
    if not rows:
        return Columns({"round": ()})
    check_columns(file, list(rows[0]))
    values: dict[str, Any] = {}
    for name in rows[0]:
        cells = [row[name] for row in rows]
        values[name] = cells if name in TEXT_COLUMNS else _numbers(cells, f"{file}: {name!r}")
    return Columns(values)


def _numbers(cells: Sequence[str], where: str) -> list[float]:
    """Return cells as numbers, truth values as 1 and 0; UserError for any other text."""
    numbers = []
    for cell in cells:
        if cell in NO_NUMBER:
            numbers.append(math.nan)
        elif cell in TRUTHS:
            numbers.append(TRUTHS[cell])
        else:
            try:
                numbers.append(float(cell))
            except (TypeError, ValueError):  # TypeError: a row with fewer cells than columns
                raise UserError(f"{where} has text in place of numbers, {CHANGED}") from None
    return numbers


def check_columns(file: Path, names: Sequence[str]) -> None:
    """Raise UserError where a record lacks columns that every run writes."""
    is_summary = file.name == "summary.csv"
    for key in SUMMARY_KEYS if is_summary else ("round",):
        if key not in names:
            raise UserError(f"{file}: it has no column {key!r}, {CHANGED}")
    for rule in RULES if is_summary else ():
        has_target = any(name.startswith(f"{rule}_target_") for name in names)
        if f"{rule}_round" not in names or not has_target:
            raise UserError(f"{file}: it lacks '{rule}_round' or '{rule}_target_*', {CHANGED}")


def is_finished(run: Path) -> bool:
    """Whether the run in a folder has finished; its summary is written last."""
    return (run / "summary.csv").is_file()


def text_rows(file: Path) -> list[dict[str, str]]:
    """The complete rows of a record file as text; none without the file, and none where it cannot be read."""
    try:
        return text_rows_of(file)
    except UserError:
        return []


def text_rows_of(file: Path) -> list[dict[str, str]]:
    """The complete rows of a record file as text; none without the file. UserError where it cannot be read."""
    text = read_text(file) if file.is_file() else ""
    lines = io.StringIO(complete_lines(text))
    with named(file, "the rows"):
        return list(csv.DictReader(lines))


def complete_lines(text: str) -> str:
    """Return the text without an incomplete last line, which is being written or was cut off."""
    end = text.rfind("\n") + 1
    return text[:end]


def trained_rounds(run: Path) -> list[dict[str, str]]:
    """The rows of rounds.csv from round 1 on, as text; an incomplete last line and an unreadable file are left out."""
    rows = []
    for row in text_rows(run / "rounds.csv"):
        number = row.get("round") or ""
        if number.isdecimal() and int(number) >= 1:
            rows.append(row)
    return sorted(rows, key=lambda row: int(row["round"]))


def summary_rows(run: Path) -> list[dict[str, str]]:
    """The rows of a run's summary as text; none where it is cut off or no summary any more."""
    rows = []
    for row in text_rows(run / "summary.csv"):
        is_complete = all(row.get(key) is not None for key in SUMMARY_KEYS)
        if is_complete and row["seed"].isdecimal():
            rows.append(row)
    return rows


def _has_numbers(values: "pd.Series") -> bool:
    """Whether a column holds only numbers, truth values and empty cells."""
    import pandas as pd

    if pd.api.types.is_numeric_dtype(values):
        return True
    return all(isinstance(value, bool | int) for value in values.dropna())
