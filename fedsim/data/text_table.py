"""A table of texts, whose columns are looked at by distinct text: 10,000 rows with two texts take two looks.

A table that comes with fedsim is read without pandas, whose import takes longer than a hospital's first ten rounds.
"""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".csv", ".tsv", ".parquet")  # of files that hold a table
FIRST_ROW = 2  # as an editor counts: the header is row 1


@dataclass(frozen=True, eq=False)
class Cells:
    """A column of N rows.

    texts: the distinct texts. places: int [N], which of them a row has. rows: int [N], numbers of the rows from 0 on
    """

    texts: Sequence[str]
    places: np.ndarray
    rows: np.ndarray

    @classmethod
    def of(cls, column: Any, rows: np.ndarray | None = None) -> "Cells":
        """Return a column of texts: pandas' Series, or a sequence. rows: their numbers, by default from 0 on."""
        rows = np.arange(len(column)) if rows is None else rows
        if hasattr(column, "factorize"):
            places, texts = column.fillna("").factorize()  # a missing text would have the place of the last one
            return cls(texts.tolist(), places, rows)
        place_of: dict[str, int] = {}
        places = [place_of.setdefault(text, len(place_of)) for text in column]
        return cls(list(place_of), np.array(places, dtype=np.int64), rows)

    def __len__(self) -> int:
        return len(self.places)

    def each(self, function: Callable[[str], Any], dtype: Any = object) -> np.ndarray:
        """Return what a function makes of every row's text [N]; it is called once for each distinct text."""
        values = np.empty(len(self.texts), dtype)
        values[:] = [function(text) for text in self.texts]
        return values[self.places]

    def text(self, position: int) -> str:
        """Return the text of a row."""
        return self.texts[self.places[position]]

    def row(self, position: int, first: int = FIRST_ROW) -> int:
        """Return the number of a row in its file, whose first row has the number `first`."""
        return int(self.rows[position]) + first

    def chosen(self, mask: np.ndarray) -> "Cells":
        """Return some of the rows, with those distinct texts that they have."""
        present, places = np.unique(self.places[mask], return_inverse=True)
        texts = [self.texts[place] for place in present]
        return Cells(texts, places, self.rows[mask])


@dataclass(frozen=True, eq=False)
class TextTable:
    """Columns of texts by name, each [N], and the number of each row in its file, from 0 on."""

    columns: Mapping[str, Any]
    rows: np.ndarray
    _latest: dict[str, Cells] = field(default_factory=dict)  # one column alone: of all columns they are large

    @classmethod
    def of(cls, frame: "pd.DataFrame") -> "TextTable":
        """Return the table of a frame of texts, whose index has the numbers of its rows."""
        columns = {str(name): frame[name] for name in frame.columns}
        return cls(columns, frame.index.to_numpy())

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> Cells:
        if name not in self._latest:
            self._latest.clear()
            self._latest[name] = Cells.of(self.columns[name], self.rows)
        return self._latest[name]

    def chosen(self, mask: np.ndarray) -> "TextTable":
        """Return the rows of a mask [N]."""
        columns = {name: column[mask] for name, column in self.columns.items()}
        return TextTable(columns, self.rows[mask])

    def frame(self) -> "pd.DataFrame":
        """Return the table as pandas' frame."""
        import pandas as pd

        return pd.DataFrame(dict(self.columns), index=self.rows)


def records(file: Path) -> Iterator[tuple[int, bool]]:
    """Yields for each row of a text its number, the first one's being 1, and whether it is blank."""
    separator = "\t" if file.suffix.lower() == ".tsv" else ","
    with file.open(encoding="utf-8-sig", newline="") as lines:
        for number, row in enumerate(csv.reader(lines, delimiter=separator), start=1):
            is_blank = not row or (len(row) == 1 and row[0].isspace())
            yield number, is_blank


def numbers_of_rows(file: Path) -> np.ndarray | None:
    """Returns the number of each row of a text below the header, as `TextTable` counts them, without blank ones.

    pandas does not count these. None where no line is blank, so that the rows have the numbers 0 to N-1.
    """
    with file.open("rb") as lines:
        if all(map(bytes.strip, lines)):
            return None
    _, *numbers = [number for number, is_blank in records(file) if not is_blank]
    return np.array(numbers, dtype=np.int64) - FIRST_ROW


def read_shipped(file: Path) -> TextTable:
    """Return a table that comes with fedsim, so that nothing can be wrong with it."""
    with file.open(encoding="utf-8", newline="") as lines:
        header, *rows = csv.reader(lines)
    columns = {}
    for place, name in enumerate(header):
        columns[name] = np.array([row[place].strip() for row in rows], dtype=object)
    return TextTable(columns, np.arange(len(rows)))


def number_of(text: str) -> float:
    """Return the number that a text is; NaN for any other text, also for digits that only Python reads."""
    if "_" in text or not text.isascii():
        return np.nan
    try:
        return float(text)
    except ValueError:
        return np.nan
