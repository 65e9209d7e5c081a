"""Reads a table of numbers: each row an example with its label and domain, in CSV, TSV or Parquet.

    [data.columns]
    features = ["age", "chol", "cp"]                        # default: all columns but label, domain and split
    categories = {cp = ["typical angina", "asymptomatic"]}  # or ["cp"]: the values that the sources have
    missing = {chol = ["0"]}                                # values that mean an empty cell
    label = "disease"                                       # a list of columns where data.task = "multi-label"
    domain = "hospital"

A row begins with its numbers, NaN where a cell is empty. With data.missing = "indicator" a 1 follows for each that is
empty. At the end every column of categories has a 0 or 1 for each value, and one for any other value.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedsim.common.errors import UserError, nearest
from fedsim.common.tasks import MULTI_LABEL
from fedsim.data.array_rows import usual_columns
from fedsim.data.findings import Finding, joined_names
from fedsim.data.label_findings import number_findings, spelling_findings
from fedsim.data.names import composed, plain
from fedsim.data.row import Benchmark
from fedsim.data.targets import refuse_tiny, wrong_targets
from fedsim.data.text_table import FIRST_ROW, Cells, TextTable, number_of, records
from fedsim.settings import DataSettings

if TYPE_CHECKING:
    import pandas as pd

    from fedsim.data.scaling import Scale

EMPTY = ("", "na", "n/a", "nan", "null", "none", "?")  # texts of an empty cell, in any case
WHOLE = re.compile("[+-]?[0-9]+")  # a whole number, of which a float keeps no more than 15 digits
TRUTHS = {"true": "1", "false": "0"}
LISTS = ("features", "categories", "missing")
NAMES = ("label", "domain", "split")
OTHER = "(other)"
Notes = Iterator[tuple[int, str]]  # (position of an odd cell, clause on it)
FEW = 5  # names that a message lists
FAR = 6.0  # standard deviations from the mean, beyond which hardly any value was trained on
MOST = 10  # sentences on a table


@dataclass(frozen=True)
class Columns:
    """What the columns of a table are.

    features: the names of the used columns, in order; () for all that are nothing else
    categories: {column: its values}; () for the values that the sources have
    missing: {column: texts that mean an empty cell}
    group: the column of patients, sequences and so on, whose rows are never split; empty for none
    """

    labels: tuple[str, ...]
    domain: str
    split: str
    features: tuple[str, ...]
    categories: Mapping[str, tuple[str, ...]]
    missing: Mapping[str, tuple[str, ...]]
    group: str = ""

    @property
    def label(self) -> str:
        """The column of the label, the first one where there are several."""
        return self.labels[0]

    @property
    def numbers(self) -> tuple[str, ...]:
        """The features that are numbers."""
        return tuple(name for name in self.features if name not in self.categories)

    def empty(self, rows: TextTable, name: str) -> np.ndarray:
        """Which cells of a column are empty, bool [N]."""
        return is_empty(rows[name], self.missing.get(name, ()))

    def names_of_inputs(self, missing: str) -> tuple[str, ...]:
        """Names of the numbers that a row becomes; `missing` is `data.missing`."""
        names = list(self.numbers)
        if missing == "indicator":
            names += [f"{name} is empty" for name in self.numbers]
        for name, values in self.categories.items():
            names += [f"{name}={value}" for value in (*values, OTHER)]
        return tuple(names)


def columns_of(data: DataSettings, usual: Mapping[str, str]) -> Columns:
    """The columns that `data.columns` names; `usual` has the names of label and domain where it does not.

    Raises UserError for an unknown key, or a value of a wrong form.
    """
    keys = (*NAMES, "group", *LISTS)
    for key in data.columns:
        if key not in keys:
            hint = f"{nearest(key, keys)}known: {', '.join(keys)}"
            raise UserError(f"data.columns: no key {key!r}; {hint}")
    features = data.columns.get("features", [])
    if not isinstance(features, list):
        raise UserError("data.columns.features: write a list of columns, such as ['age', 'chol']")
    named = data.columns.get("categories", {})
    if isinstance(named, list):
        named = {name: [] for name in named}
    categories = {}
    for name, values in _texts_by_column(named, "categories").items():
        categories[name] = tuple(map(composed, values))
    missing = _texts_by_column(data.columns.get("missing", {}), "missing")
    for key, named_columns in (("categories", categories), ("missing", missing)):
        for name in named_columns:
            if features and name not in features:
                raise UserError(
                    f"data.columns.{key}: {name!r} is none of data.columns.features; add it there, or leave it out here"
                )
    return Columns(
        labels=_labels_of(data, usual),
        domain=data.column("domain", usual.get("domain", "domain")),
        split=data.column("split", usual.get("split", "split")),
        features=tuple(features),
        categories=categories,
        missing=missing,
        group=data.column("group", ""),
    )


def _labels_of(data: DataSettings, usual: Mapping[str, str]) -> tuple[str, ...]:
    """The columns of labels: one, or the list of a task that has several; UserError for a list with another task."""
    usual_name = usual.get("label", "label")
    given = data.columns.get("label", usual_name)
    if isinstance(given, str):
        return (given,)
    if data.task != MULTI_LABEL.name:
        raise UserError(
            f"data.columns.label: {given!r} is not the name of one column; several columns of 0 and 1 are "
            "data.task = 'multi-label'"
        )
    if not given or len(set(given)) < len(given):
        raise UserError(f"data.columns.label: {given!r} names no column, or one twice")
    return tuple(given)


def _texts_by_column(table: object, key: str) -> dict[str, tuple[str, ...]]:
    """A table {column: list of texts} of the settings."""
    if not isinstance(table, dict):
        raise UserError(f"data.columns.{key}: write a table, such as {{cp = ['asymptomatic', 'non-anginal']}}")
    return {str(name): tuple(values) for name, values in table.items()}


def read_table(file: Path) -> TextTable:
    """All cells of a table as text without blanks at both ends; an empty cell is an empty text.

    Raises UserError for a file that cannot be read, that has no rows, or that has two columns of one name.
    """
    import pandas as pd

    from fedsim.data.tables import header_of, read_pieces

    header = header_of(file)
    for name in header:
        count = header.count(name)
        if count > 1:
            raise UserError(f"{file} has {count} columns {name!r}; remove or rename all but one")
    parts = [piece.apply(_texts) for piece in read_pieces(file, header)]
    if not any(map(len, parts)):
        raise UserError(f"{file} has no rows")
    return TextTable.of(pd.concat(parts))


def refuse_blank_rows(file: Path) -> None:
    """Raises UserError for a blank row of a text above others, for tables whose rows are named by their numbers.

    A blank row is no row of a table that is read, so that the others would have smaller numbers than in an editor.
    """
    if file.suffix.lower() == ".parquet":
        return
    blank = 0
    for number, is_blank in records(file):
        if is_blank:
            blank = blank or number
        elif blank:
            raise UserError(
                f"{file}, row {blank}: it is blank, and the rows below it would be called by other numbers than "
                "they have; remove it"
            )


def _texts(cells: "pd.Series") -> "pd.Series":
    """The cells of a column as text without blanks at both ends."""
    import pandas as pd

    if pd.api.types.is_string_dtype(cells.dtype) and not cells.isna().any():
        return cells.astype(str).str.strip()
    return cells.map(_text_of_cell)


def _text_of_cell(cell: object) -> str:
    """A cell as text. A whole number that a Parquet file has as a float loses its `.0`."""
    import pandas as pd

    if isinstance(cell, str):
        return cell.strip()
    if cell is None or cell is pd.NA or cell != cell:
        return ""
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    return str(cell)


def text_of_names(cells: Cells) -> np.ndarray:
    """A column of names as texts [N], in Unicode's composed form."""
    return cells.each(composed)


def is_empty(cells: Cells, also: Sequence[str] = ()) -> np.ndarray:
    """Which cells are empty, bool [N]; `also` are further texts that mean it, and numbers equal to them."""
    if not also:
        return cells.each(lambda text: text.lower() in EMPTY, bool)
    numbers = [float(text) for text in also if _is_number(text)]

    def is_missing(text: str) -> bool:
        if text.lower() in EMPTY or text in also:
            return True
        return number_of(text) in numbers

    return cells.each(is_missing, bool)


def refuse_empty(cells: Cells, where: str, what: str, first_row: int = FIRST_ROW) -> None:
    """Raises UserError with the row for the first empty cell.

    what: the thing that a cell holds, such as a label; first_row: the number of the first row
    """
    for position in np.flatnonzero(is_empty(cells))[:1]:
        row = cells.row(position, first_row)
        raise UserError(f"{where}, row {row}: the {what} is empty; fill it in, or leave the row out")


def as_numbers(cells: Cells) -> np.ndarray:
    """A column as float64 [N], true and false as 1 and 0; a text that is no number is NaN."""

    def number(text: str) -> float:
        digits = TRUTHS.get(text.lower(), text)
        return number_of(digits)

    return cells.each(number, np.float64)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def numbers_of(cells: Cells, empty: np.ndarray, where: str) -> np.ndarray:
    """A column as float64 [N], NaN where it is `empty`.

    Raises UserError with the row for a text that is no number, and for infinity.
    """
    values = as_numbers(cells)
    is_wrong = ~np.isfinite(values) & ~empty
    for position in np.flatnonzero(is_wrong)[:1]:
        text = cells.text(position)
        cell = f"{where}, row {cells.row(position)}: {text!r}"
        if _is_number(text):
            raise UserError(f"{cell} is not finite; correct it, or leave the cell empty")
        raise UserError(
            f"{cell} is no number; correct it, name the column in data.columns.categories, or name such texts in "
            "data.columns.missing"
        )
    return np.where(empty, np.nan, values)


def with_features(columns: Columns, header: Iterable[str], where: object) -> Columns:
    """The columns with the features filled in, and checked against a table's header."""
    present = list(header)
    special = (*columns.labels, columns.domain, columns.split, columns.group)
    header_text = f"it has: {', '.join(present)}"
    if columns.group and columns.group not in present:
        hint = f"{nearest(columns.group, present)}{header_text}"
        raise UserError(f"{where} has no column {columns.group!r} (data.columns.group); {hint}")
    others = tuple(name for name in present if name not in special)
    features = columns.features or others
    for name in (*features, *columns.categories, *columns.missing):
        if name not in present:
            hint = f"{nearest(name, present)}{header_text}"
            raise UserError(f"{where} has no column {name!r} (data.columns); {hint}")
        if name in special:
            raise UserError(
                f"data.columns: {name!r} is a feature, and also the label, the domain, the split or the group"
            )
    if not features:
        raise UserError(f"{where} has no column besides label and domain; a row needs at least one feature")
    return replace(columns, features=features)


def left_out_columns(columns: Columns, tables: Mapping[Path, TextTable]) -> list[Finding]:
    """A finding for each of several tables with columns that are no features, because the first table lacks them.

    columns: with the features of the first table, which the settings do not name
    """
    special = (*columns.labels, columns.domain, columns.split, columns.group)
    findings = []
    first = next(iter(tables))
    for file, table in tables.items():
        names = [name for name in table.columns if name not in (*columns.features, *special)]
        if not names:
            continue
        finding = Finding(
            kind="left-out",
            where=str(file),
            count=len(table),
            text=f"{file}: its columns {joined_names(names)} are no features, because {first.name} has none of them",
            remedy="name the features in data.columns.features",
        )
        findings.append(finding)
    return findings


def with_categories(columns: Columns, tables: Sequence[TextTable]) -> Columns:
    """The columns with the values that these rows have, sorted, where the settings name a column of categories alone.

    tables: those of the sources, because the values of the unseen domain are not known before it is tested
    """
    categories = {}
    for name, values in columns.categories.items():
        if values:
            categories[name] = values
            continue
        present: set[str] = set()
        for rows in tables:
            is_empty = columns.empty(rows, name)
            cells = rows[name].chosen(~is_empty)
            present.update(cells.texts)
        categories[name] = tuple(sorted(map(composed, present)))
    return replace(columns, categories=categories)


def category_findings(columns: Columns, tables: Sequence[TextTable], where: object) -> list[Finding]:
    """The findings in the cells of columns of categories, each of which changes the inputs of a row without an error.

    They are one number in two forms, two spellings of one name, and a declared value that counts as an empty cell.
    """
    findings = []
    for name, values in columns.categories.items():
        place = f"{where}, column {name!r}"
        counts = Counter(dict.fromkeys(values, 0))
        for rows in tables:
            counts.update(text_of_names(rows[name]).tolist())
        missing = columns.missing.get(name, ())
        counts_as_empty = is_empty(Cells.of(list(counts)), missing)
        present = dict(counts)
        for text, is_missing in zip(counts, counts_as_empty):
            if is_missing:
                del present[text]
        findings += number_findings(present, place)
        findings += spelling_findings(present, place)
        for value in values:
            if value in present or value in missing:
                continue
            text = f"{place}: the category {value!r} (rows: {counts[value]:,}) counts as an empty cell"
            remedy = "write another word for it in the table and in data.columns.categories"
            findings.append(Finding("empty-category", place, counts[value], text, remedy))
    return findings


def encode(rows: TextTable, columns: Columns, missing: str, where: str) -> np.ndarray:
    """Rows as float32 [N, D], see the module's text; `missing` is `data.missing`."""
    inputs = []
    for name in columns.numbers:
        column = f"{where}, column {name!r}"
        inputs.append(numbers_of(rows[name], columns.empty(rows, name), column))
    if missing == "indicator":
        inputs += [columns.empty(rows, name) for name in columns.numbers]
    for name, values in columns.categories.items():
        inputs += _one_hot(rows[name], values, columns.empty(rows, name))
    return np.stack(inputs, axis=1).astype(np.float32)


def _one_hot(cells: Cells, values: Sequence[str], empty: np.ndarray) -> list[np.ndarray]:
    """A column [N] for each of the values, and one for any other; an empty cell is in none."""
    texts = text_of_names(cells)
    columns = [(texts == value) & ~empty for value in values]
    is_other = cells.each(lambda text: composed(text) not in values, bool)
    return [*columns, is_other & ~empty]


def incomplete_rows(rows: TextTable, columns: Columns) -> np.ndarray:
    """Which rows have an empty feature, bool [N]."""
    incomplete = np.zeros(len(rows), dtype=bool)
    for name in columns.features:
        incomplete |= columns.empty(rows, name)
    return incomplete


def complete_rows(rows: TextTable, columns: Columns) -> TextTable:
    """The rows in which no feature is empty."""
    return rows.chosen(~incomplete_rows(rows, columns))


def names_of_labels(cells: Cells, where: str, first_row: int = FIRST_ROW) -> np.ndarray:
    """The labels of rows as names of classes [N]; whole numbers lose a `.0`. `first_row`: the number of the first row.

    Raises UserError with the row for an empty label, and for a number with a fraction.
    """
    refuse_empty(cells, where, "label", first_row)

    def name(text: str) -> str:
        if WHOLE.fullmatch(text):
            return str(int(text))
        number = number_of(text)
        if np.isnan(number):
            return composed(text)
        if not number.is_integer():
            raise UserError(
                f"{where}: the label {text!r} has a fraction; labels are names or numbers of classes; "
                "where numbers are to be predicted, set data.task = 'regression'"
            )
        return str(int(number))

    return cells.each(name)


def targets_of(cells: Cells, task: str, where: str) -> np.ndarray:
    """The targets float32 [N] of rows: numbers for a regression, 0 and 1 (or false and true) for several labels.

    Raises UserError with the row for an empty cell, for a text that is no number, and for a label that is not 0 or 1.
    """
    refuse_empty(cells, where, "label")
    values = as_numbers(cells)
    is_wrong, fault = wrong_targets(values, task)
    for position in np.flatnonzero(is_wrong)[:1]:
        label = f"{where}, row {cells.row(position)}: the label {cells.text(position)!r}"
        raise UserError(f"{label} is {fault}, which data.task = {task!r} needs")
    refuse_tiny(values, task, where)
    return values.astype(np.float32)


def class_order(name: str) -> tuple[int, str]:
    """The key by which classes are sorted: numbers by value, then other names."""
    if WHOLE.fullmatch(name):
        return int(name), ""
    return 2**62, name


def read_rows(file: Path, data: DataSettings, bench: Benchmark) -> tuple[Columns, TextTable]:
    """Returns (the columns that a run had, the rows of a table that its model takes).

    With data.missing = 'drop' these are the rows in which no feature is empty, as in training.

    bench: the data set of the run, whose features name the values of every column of categories

    Raises UserError for another data set, for a table that lacks a column, and for one without such a row.
    """
    columns = recorded_columns(file, data, bench)
    table = read_table(file)
    refuse_blank_rows(file)
    columns = with_features(columns, table.columns, file)
    if data.missing == "drop":
        table = complete_rows(table, columns)
    if not len(table):
        raise UserError(f"{file}: every row has an empty cell, so that data.missing = 'drop' leaves none")
    return columns, table


def recorded_columns(file: Path, data: DataSettings, bench: Benchmark) -> Columns:
    """The columns of a run, without that of groups, with the features and categories that its data set had.

    Raises UserError for a data set that was no table; `file` is the one that was to be read.
    """
    if not bench.features:
        raise UserError(f"{file}: this model takes tensors of the shape {list(bench.shape)}, which no table has")
    columns = columns_of(data, usual_columns(bench.name))
    categories = {}
    for name in columns.categories:
        prefix = f"{name}="
        of_column = [feature for feature in bench.features if feature.startswith(prefix)]
        values = [feature.removeprefix(prefix) for feature in of_column]
        categories[name] = tuple(values[:-1])  # without (other)
    features = (*bench.features[: bench.numeric], *categories)
    return replace(columns, features=features, categories=categories, group="")


def cell_notes(file: Path, data: DataSettings, bench: Benchmark, scale: "Scale | None") -> list[str]:
    """Returns a sentence for each odd cell of a table's features, ten at most, and how many others there are.

    A cell is odd if its category was not trained, if its text counts as empty, or if its number is further than six
    standard deviations from the mean. A sentence before them says which rows data.missing = 'drop' leaves out.
    scale: means and deviations of the numbers of the run, where it has them

    Raises UserError for a table that lacks a column of the run.
    """
    table = read_table(file)
    columns = with_features(recorded_columns(file, data, bench), table.columns, file)
    dropped = _dropped_note(file, table, columns) if data.missing == "drop" else []
    notes: list[tuple[int, str]] = []
    for name in columns.features:
        cells = table[name]
        for position, text in _column_notes(columns, name, cells, scale):
            row = cells.row(position)
            notes.append((row, f"{file}, row {row}: {text}"))
    sentences = [sentence for _, sentence in sorted(notes)]
    listed = sentences[:MOST]
    more = len(sentences) - MOST
    if more > 0:
        listed.append(f"{file}: {more} more such cells")
    return dropped + listed


def _dropped_note(file: Path, table: TextTable, columns: Columns) -> list[str]:
    """The sentence on the rows that data.missing = 'drop' leaves out; none where every row is complete."""
    dropped = np.flatnonzero(incomplete_rows(table, columns))
    if not len(dropped):
        return []
    numbers = [str(row + FIRST_ROW) for row in dropped[:MOST]]
    more = ", ..." if len(dropped) > MOST else ""
    rows = f"{len(dropped):,} of {len(table):,} rows have an empty feature"
    return [
        f"{file}: {rows} (numbers {', '.join(numbers)}{more}); data.missing = 'drop' leaves them out, as in training"
    ]


def _column_notes(columns: Columns, name: str, cells: Cells, scale: "Scale | None") -> Notes:
    """Yields (position, clause) of each odd cell of a column."""
    missing = columns.missing.get(name, ())
    empty = is_empty(cells, missing)

    def is_odd(text: str) -> bool:
        return text.lower() in EMPTY[1:] and text not in missing

    for position in np.flatnonzero(cells.each(is_odd, bool)).tolist():
        yield position, f"{name} {cells.text(position)!r} counts as an empty cell"
    if name in columns.categories:
        yield from _unknown(columns.categories[name], name, cells, empty)
    elif scale is not None:
        place = columns.numbers.index(name)
        yield from _far(name, cells, empty, scale.mean[place], scale.std[place])


def _unknown(values: Sequence[str], name: str, cells: Cells, empty: np.ndarray) -> Notes:
    """Yields (position, clause) of each cell whose category is none of the model's."""
    is_unknown = cells.each(lambda text: composed(text) not in values, bool)
    for position in np.flatnonzero(is_unknown & ~empty).tolist():
        text = cells.text(position)
        advice = f"known: {', '.join(values)}"
        for value in values:
            if plain(value) == plain(text):
                advice = f"write {value!r} if that is meant"
                break
        yield position, f"{name} {text!r} is no category of the model and counts as another value; {advice}"


def _far(name: str, cells: Cells, empty: np.ndarray, mean: float, std: float) -> Notes:
    """Yields (position, clause) of each number that is far from those that trained."""
    distances = np.abs(as_numbers(cells) - mean)
    is_far = (distances > FAR * std) & ~empty
    trained = f"their mean is {mean:.4g}, their standard deviation {std:.3g}"
    for position in np.flatnonzero(is_far).tolist():
        number = cells.text(position)
        yield position, f"{name} {number} is far from the values that trained ({trained}); check it"
