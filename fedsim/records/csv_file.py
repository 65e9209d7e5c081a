"""A CSV file that grows at its end, and that a kill at any moment leaves readable."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.common.errors import UserError
from fedsim.common.files import atomic_write, writing
from fedsim.common.lists import keys_of
from fedsim.common.tables import csv_text

CHANGED = "; the run cannot go on with it: copy the file again, or remove the run's folder and repeat the run"


class CsvFile:
    """One CSV file that grows at its end; new columns extend the header, earlier rows get empty cells."""

    def __init__(self, path: Path, columns: Iterable[str]) -> None:
        self.path = path
        self.columns = list(columns)
        first_lines = self._complete_lines(repair=True)[:1]
        self.header = next(csv.reader(first_lines), [])
        self._waiting: list[Mapping[str, Any]] = []

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds rows and writes them."""
        self.add(rows)
        self.flush()

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds rows, which wait in memory until `flush` writes them."""
        self._waiting.extend(rows)

    def flush(self) -> None:
        """Writes all rows that wait, in one write; the file is created with the first row."""
        rows = self._waiting
        if not rows:
            return
        self._waiting = []
        columns = self.header or self.columns
        new = [key for key in keys_of(rows) if key not in columns]
        is_first = not self.header
        if new and not is_first:
            self._extend(new)
        self.header = columns + new
        with writing(self.path), self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(csv_text(self.header, rows, with_header=is_first))

    def truncate(self, after_round: int) -> None:
        """Drop the rows of later rounds; a negative round drops the file."""
        if after_round < 0:
            self.path.unlink(missing_ok=True)
            self.header = []
            return
        rounds = self.rounds()
        lines = self._complete_lines()
        earlier = lines[:1]  # the header, and the rows that stay; they are not parsed, so that they stay unchanged
        for number, line in zip(rounds, lines[1:]):
            if number <= after_round:
                earlier.append(line)
        if len(earlier) < len(lines):
            atomic_write(self.path, "".join(earlier))

    def rounds(self) -> list[int]:
        """The round of every complete row, which is always the first column; UserError when that is not so."""
        lines = self._complete_lines()
        if lines and _first_cell(lines[0]) != "round":
            raise UserError(f"{self.path}: its first column is not called round{CHANGED}")
        numbers = []
        for line in lines[1:]:
            cell = _first_cell(line)
            if not (cell.isascii() and cell.isdecimal()):
                raise UserError(f"{self.path}: {cell!r} is not the number of a round{CHANGED}")
            numbers.append(int(cell))
        return numbers

    def numbers(self) -> list[dict[str, float]]:
        """The complete rows without their empty cells; UserError when a cell is not a number."""
        rows = []
        for row in csv.DictReader(self._complete_lines()):
            filled = {column: cell for column, cell in row.items() if cell != ""}
            try:
                rows.append({column: float(cell) for column, cell in filled.items()})
            except (TypeError, ValueError):  # TypeError: more or fewer cells than columns
                raise UserError(f"{self.path}: round {row['round']} has cells that are not numbers{CHANGED}") from None
        return rows

    def _extend(self, new: list[str]) -> None:
        head, *lines = self._complete_lines()
        names = csv_text(new, []).rstrip("\n")
        empty = "," * len(new)
        text = f"{head.rstrip()},{names}\n"
        for line in lines:
            row = line.rstrip("\n")
            text += f"{row}{empty}\n"
        atomic_write(self.path, text)

    def _complete_lines(self, repair: bool = False) -> list[str]:
        """All complete lines; `repair` also removes an incomplete last line from the file."""
        if not self.path.is_file():
            return []
        data = self.path.read_bytes()
        complete = data[: data.rfind(b"\n") + 1]
        try:
            lines = complete.decode("utf-8").splitlines(keepends=True)
        except UnicodeDecodeError:
            raise UserError(f"{self.path}: it is not text in UTF-8{CHANGED}") from None
        if repair and len(complete) < len(data):
            atomic_write(self.path, complete)
        return lines


def _first_cell(line: str) -> str:
    return line.rstrip("\r\n").split(",", 1)[0]
