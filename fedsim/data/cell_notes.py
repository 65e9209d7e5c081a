"""Says which cells of a table a trained model cannot take as they are written: nothing in a prediction would tell."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fedsim.data.feature_tables import EMPTY, Columns, as_numbers, is_empty, read_table, recorded_columns, with_features
from fedsim.data.names import composed, plain
from fedsim.data.row import Benchmark
from fedsim.data.scaling import Scale
from fedsim.data.text_table import Cells
from fedsim.settings import DataSettings

FAR = 6.0  # standard deviations from the mean, beyond which hardly any value was trained on
MOST = 10  # sentences on a table


def cell_notes(file: Path, data: DataSettings, bench: Benchmark, scale: Scale | None) -> list[str]:
    """Returns a sentence for each odd cell of a table's features, ten at most, and how many others there are.

    A cell is odd if its category was not trained, if its text counts as empty, or if its number is further than six
    standard deviations from the mean. scale: means and deviations of the numbers of the run, where it has them

    Raises UserError for a table that lacks a column of the run.
    """
    table = read_table(file)
    columns = with_features(recorded_columns(file, data, bench, {}), table.columns, file)
    notes: list[tuple[int, str]] = []
    for name in columns.features:
        cells = table[name]
        for position, text in _column_notes(columns, name, cells, scale):
            row = int(cells.rows[position]) + 2  # as an editor counts: the header is line 1
            notes.append((row, f"{file}, row {row}: {text}"))
    sentences = [sentence for _, sentence in sorted(notes)]
    more = len(sentences) - MOST
    return sentences[:MOST] + ([f"{file}: {more} more such cells"] if more > 0 else [])


def _column_notes(columns: Columns, name: str, cells: Cells, scale: Scale | None) -> Iterator[tuple[int, str]]:
    """Yields (position, clause) of each odd cell of a column."""
    empty = is_empty(cells, columns.missing.get(name, ()))
    has_text = cells.each(lambda text: text.lower() in EMPTY[1:] and text not in columns.missing.get(name, ()), bool)
    for position in np.flatnonzero(has_text).tolist():
        yield position, f"{name} {cells.text(position)!r} counts as an empty cell"
    if name in columns.categories:
        yield from _unknown(columns.categories[name], name, cells, empty)
    elif scale is not None:
        place = columns.numbers.index(name)
        yield from _far(name, cells, empty, scale.mean[place], scale.std[place])


def _unknown(values: tuple[str, ...], name: str, cells: Cells, empty: np.ndarray) -> Iterator[tuple[int, str]]:
    """Yields (position, clause) of each cell whose category is none of the model's."""
    is_unknown = cells.each(lambda text: composed(text) not in values, bool)
    for position in np.flatnonzero(is_unknown & ~empty).tolist():
        text = cells.text(position)
        twins = [value for value in values if plain(value) == plain(text)]
        advice = f"write {twins[0]!r} if that is meant" if twins else f"known: {', '.join(values)}"
        yield position, f"{name} {text!r} is no category of the model and counts as another value; {advice}"


def _far(name: str, cells: Cells, empty: np.ndarray, mean: float, std: float) -> Iterator[tuple[int, str]]:
    """Yields (position, clause) of each number that is far from those that trained."""
    distances = np.abs(as_numbers(cells) - mean)
    for position in np.flatnonzero((distances > FAR * std) & ~empty).tolist():
        trained = f"their mean is {mean:.4g}, their standard deviation {std:.3g}"
        yield position, f"{name} {cells.text(position)} is far from the values that trained ({trained}); check it"
