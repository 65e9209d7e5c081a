"""results.csv of an experiment's folder: a row for each finished run, copied from its summary as text."""

import csv
import os
from pathlib import Path

from fedsim.common.errors import UserError
from fedsim.common.files import alone, atomic_write, writing
from fedsim.common.lists import keys_of
from fedsim.common.tables import csv_text
from fedsim.records.reading import find_runs
from fedsim.records.record_files import summary_rows

FILE = "results.csv"


def write_results(folder: Path) -> None:
    """Write results.csv anew: one row per finished run of an experiment's folder, sorted by method, target and seed.

    The cells are copied as text, so that the file depends only on the summaries. A damaged summary is left out.
    Raises UserError for a folder that does not exist, and for one without a finished run.
    """
    find_runs(folder)  # a folder that does not exist is said
    with alone(folder):  # a run that ends at the same time would be missing in the file that is written last
        rows = []
        for path in find_runs(folder):
            rows += summary_rows(path)
        if not rows:
            raise UserError(f"{folder}: no finished run yet, nothing to collect in results.csv")
        rows.sort(key=lambda row: (row["method"], row["target"], int(row["seed"])))
        atomic_write(folder / FILE, csv_text(keys_of(rows), rows))


def add_result(folder: Path, run: Path) -> None:
    """Append the row of a run that has just finished, which takes no longer with many rows than with few.

    The rows stand in the order in which their runs ended until `write_results` sorts them. That writes the file anew
    also where it is not there, where its last line was cut off, and where it lacks a column of the run.
    """
    file = folder / FILE
    with alone(folder):
        rows = summary_rows(run)
        header = _header(file)
        if rows and set(header).issuperset(keys_of(rows)):
            with writing(file), file.open("a", encoding="utf-8", newline="") as lines:
                lines.write(csv_text(header, rows, with_header=False))
            return
    write_results(folder)


def _header(file: Path) -> list[str]:
    """The columns of a file; none where it is not there, and where its last line is incomplete."""
    if not file.is_file():
        return []
    with file.open("rb") as content:
        first = content.readline()
        if first:
            content.seek(-1, os.SEEK_END)
        is_complete = content.read(1) == b"\n"
    text = first.decode("utf-8", errors="replace")
    return next(csv.reader([text])) if is_complete else []
