"""Inspects a table of numbers before training: rows, empty cells, suspicious values, and an experiment file for it."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import tomli_w

from fedsim.common.errors import UserError
from fedsim.common.tasks import BINARY, MULTI_LABEL, OF_TENSORS
from fedsim.data.benchmarks import benchmark, find_dataset, with_task
from fedsim.data.feature_tables import (
    TRUTHS,
    Columns,
    class_order,
    columns_of,
    names_of_labels,
    read_table,
    targets_of,
    text_of_names,
    with_features,
)
from fedsim.data.findings import joined_names, lines_of
from fedsim.data.label_findings import class_findings, count_names, number_findings, spelling_findings
from fedsim.data.names import subfolders
from fedsim.data.reader import reader
from fedsim.data.tables import header_of, read_pieces
from fedsim.data.targets import STRATUM
from fedsim.data.text_table import FIRST_ROW, SUFFIXES, Cells, TextTable
from fedsim.settings import DataSettings

Place = Callable[[int], str]  # what the row at a position is called
MOST_VALUES = 30  # different texts of a column of categories; a column with more is rather a name or a date
FEW_VALUES = 10  # a column with so few different numbers may have a 0 that means 0
GAP = 0.1  # a 0 that is so far below all other numbers, as a share of their span, was perhaps not measured
SHOWN = 10  # pairs of equal rows that are listed
FILE_NAMES = "no column {column!r}: the name of each file is the domain of its rows; data.columns.domain names a column"
MISSING_LINE = 'missing = "mean"  # an empty cell: "mean", "indicator" (its own input says so) or "drop" (the row)'
TRY_LINEAR = '# also try "linear" without options: the order of methods may change with the network'
SAYS_WHICH = "whether the cell is empty says which domain it is; consider leaving the column out of the features"
MOSTLY_EMPTY = 0.9  # the share of a domain's rows from which an empty feature says which domain it is
TELLS = (  # of a column
    "alone tells the class of every row, perhaps as the label in other words; the experiment file below leaves it out "
    "of the features"
)


@dataclass
class TableInspection:
    """What a table holds.

    counts: rows by domain and class
    columns: for each feature its kind, its values, and the number of empty cells in each domain
    problems: sentences
    experiment: the text of an experiment file for it
    """

    counts: pd.DataFrame
    columns: pd.DataFrame
    problems: list[str]
    experiment: str


@dataclass(frozen=True, eq=False)
class Rows:
    """The N rows of a table, or of one for each domain.

    columns: what the columns are, and which of them are features
    cells: pandas' frame of texts, with a column of domains
    domains, labels: the domain and the class of each row
    place: what a row at a position is called, with its number in its file
    empty: for each feature which of its cells are empty, bool [N]
    """

    columns: Columns
    cells: pd.DataFrame
    domains: pd.Series
    labels: pd.Series
    place: Place
    empty: Mapping[str, np.ndarray]


def is_table_of_numbers(path: Path, data: DataSettings) -> bool:
    """Whether a path is a table, or a folder of tables alone, without image files and with a column of numbers."""
    files = tables_in(path)
    if not files:
        return False
    header = header_of(files[0])
    if data.column("path", "path") in header:
        return False
    if path.is_dir() and subfolders(path):
        return False
    first = next(read_pieces(files[0], header), pd.DataFrame())
    named = set(columns_of(data, {}).labels)
    for name in ("domain", "split", "group"):
        named.add(data.column(name, name))
    features = [name for name in first.columns if name not in named]
    return any(pd.to_numeric(first[name], errors="coerce").notna().any() for name in features)


def tables_in(path: Path) -> list[Path]:
    """The table itself, or the tables that lie in a folder."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [file for file in files if file.is_file() and file.suffix.lower() in SUFFIXES]


def inspect_table(path: Path, data: DataSettings) -> TableInspection:
    """Inspects a table, or a folder with a table for each domain.

    data: settings with names of columns; a column of texts is one of categories, also where they do not say so

    Raises UserError for a table that cannot be read, and where it is not known which columns are label and domain.
    """
    for name in ("domains", "levels"):
        if getattr(data, name):
            raise UserError(
                f"data.{name}: the inspection of a table of numbers looks at all of its rows; leave it out here"
            )
    files = tables_in(path)
    tables = {file: _with_domain(file, data) for file in files}
    cells = pd.concat(tables.values(), ignore_index=True)
    place = _places_in(tables)
    columns = with_features(columns_of(data, {}), cells.columns, path)
    columns, left_out = _with_kinds(columns, cells, place)
    labels = [_labels(file, columns, table, data.task) for file, table in tables.items()]
    rows = _rows_of(columns, cells, pd.concat(labels, ignore_index=True), place)
    suspects = _suspects(rows)
    telling = [] if data.task in OF_TENSORS else _tell_the_class(rows)
    problems = _of_file_names(files[0], columns)
    problems += left_out
    problems += [sentence for _, sentence in suspects]
    problems += [f"{name} {TELLS}" for name in telling]
    problems += _of_classes(rows, f"{path}, column {columns.label!r}", data)
    problems += _of_cells(rows)
    return TableInspection(
        counts=_counts(rows),
        columns=_described(rows),
        problems=problems,
        experiment=_experiment(
            path,
            _without(columns, telling),
            is_folder=len(files) > 1,
            suspects=[name for name, _ in suspects],
            chosen=chosen_of(data),
        ),
    )


def chosen_of(data: DataSettings) -> dict[str, object]:
    """The settings of an inspection that a run needs, too, where they are given."""
    values = {name: getattr(data, name) for name in ("task", "domains", "classes")}
    return {name: value for name, value in values.items() if value}


def _places_in(tables: Mapping[Path, pd.DataFrame]) -> Place:
    """A function that names a row by its position among all tables: 'row 3', with several tables 'row 3 of b.csv'."""
    files = list(tables)
    ends = np.cumsum([len(table) for table in tables.values()])

    def place(position: int) -> str:
        number = int(np.searchsorted(ends, position, side="right"))
        file = files[number]
        table = tables[file]
        row = table.index[position - int(ends[number]) + len(table)] + FIRST_ROW
        return f"row {row}" if len(files) == 1 else f"row {row} of {file.name}"

    return place


def _rows_of(columns: Columns, cells: pd.DataFrame, labels: pd.Series, place: Place) -> Rows:
    """The rows with their domains, labels and empty cells."""
    names = text_of_names(Cells.of(cells[columns.domain]))
    table = TextTable.of(cells)
    return Rows(
        columns=columns,
        cells=cells,
        domains=pd.Series(names, index=cells.index),
        labels=labels,
        place=place,
        empty={name: columns.empty(table, name) for name in columns.features},
    )


def _labels(file: Path, columns: Columns, cells: pd.DataFrame, task: str) -> pd.Series:
    """The class of each row of a table; one and the same where targets are numbers or several labels.

    Raises UserError for a label that does not fit.
    """
    if task not in OF_TENSORS:
        texts = Cells.of(cells[columns.label], cells.index.to_numpy())
        names = names_of_labels(texts, f"{file}, column {columns.label!r}")
        return pd.Series(names, index=cells.index)
    for name in columns.labels:
        texts = Cells.of(cells[name], cells.index.to_numpy())
        targets_of(texts, task, f"{file}, column {name!r}")
    return pd.Series(STRATUM, index=cells.index)


def _with_domain(file: Path, data: DataSettings) -> pd.DataFrame:
    """A table with its column of domains; in a folder of tables it may be the name of the file."""
    table = read_table(file).frame()
    columns = columns_of(data, {})
    for label in columns.labels:
        if label not in table:
            raise _missing_column(file, label, "label", table.columns)
    if columns.domain in table:
        return table
    is_alone = len(tables_in(file.parent)) < 2
    if is_alone or "domain" in data.columns:
        raise _missing_column(file, columns.domain, "domain", table.columns)
    return table.assign(**{columns.domain: file.stem})


def _missing_column(file: Path, name: str, key: str, header: Iterable[str]) -> UserError:
    """The error of a table that lacks a column. key: of data.columns"""
    return UserError(
        f"{file} has no column {name!r}; say which one it is with --set data.columns.{key}=NAME; "
        f"it has: {', '.join(header)}"
    )


def _with_kinds(columns: Columns, rows: pd.DataFrame, place: Place) -> tuple[Columns, list[str]]:
    """The columns with every column of texts among the categories, and sentences on those that are no features."""
    categories = dict(columns.categories)
    features, left_out = [], []
    table = TextTable.of(rows)
    for name in columns.features:
        is_empty = columns.empty(table, name)
        cells = rows.loc[~is_empty, name]
        values = cells.unique()
        is_text = bool(_as_numbers(cells).isna().any())
        are_all_different = len(values) == len(rows)
        if are_all_different and (is_text or _counts_up(cells)):
            left_out.append(f"{name} has another value in every row; it is left out of the features")
            continue
        if is_text and len(values) > MOST_VALUES and name not in categories:
            left_out.append(f"{name} has {_texts_and_numbers(cells, place)}; it is left out of the features")
            continue
        features.append(name)
        if is_text or name in categories:
            categories[name] = categories.get(name) or tuple(sorted(values))
    if not features:
        raise UserError("the table has no column that can be a feature: each has another text in every row")
    return replace(columns, features=tuple(features), categories=categories), left_out


def _texts_and_numbers(cells: pd.Series, place: Place) -> str:
    """Says how many different texts a column has; where few rows have no number, which the first of them is."""
    texts = cells[_as_numbers(cells).isna()]
    if len(texts) > len(cells) / FEW_VALUES:
        return f"{cells.nunique()} different texts"
    others = "1 text:" if len(texts) == 1 else f"{len(texts)} texts, such as"
    first = texts.iloc[0]
    numbers = len(cells) - len(texts)
    remedy = f"correct it, or name it with data.columns.missing = {{{texts.name} = ['{first}']}}"
    return f"{numbers} numbers and {others} {first!r} in {place(texts.index[0])}; {remedy}"


def _counts_up(cells: pd.Series) -> bool:
    """Whether the cells are 1, 2, 3, ... or another row of consecutive whole numbers."""
    if len(cells) <= FEW_VALUES:
        return False
    numbers = pd.to_numeric(cells, errors="coerce")
    steps = numbers.diff().iloc[1:]
    return bool((steps == 1).all())


def _numbers(cells: pd.Series, empty: np.ndarray) -> np.ndarray:
    """The values of a column of numbers that are not empty."""
    return _as_numbers(cells[~empty]).to_numpy(dtype=np.float64)


def _as_numbers(cells: pd.Series) -> pd.Series:
    """The cells as numbers, true and false as 1 and 0; a text that is no number is NaN."""
    texts = cells.str.lower().replace(TRUTHS)
    return pd.to_numeric(texts, errors="coerce")


def _counts(rows: Rows) -> pd.DataFrame:
    """Rows by domain and class."""
    domains = rows.domains.rename("domain")
    table = pd.crosstab(domains, rows.labels.rename(None))
    in_order = sorted(table.columns, key=class_order)
    return table[in_order]


def _described(rows: Rows) -> pd.DataFrame:
    """A row for each feature: kind, values, and empty cells in each domain."""
    categories = rows.columns.categories
    described = []
    for name in rows.columns.features:
        is_empty = rows.empty[name]
        feature: dict[str, str | int] = {"column": name}
        if name in categories:
            feature["kind"] = "category"
            feature["values"] = ", ".join(categories[name])
        else:
            numbers = _numbers(rows.cells[name], is_empty)
            feature["kind"] = "number"
            feature["values"] = _span(numbers) if len(numbers) else "-"
        for domain in sorted(rows.domains.unique()):
            of_domain = is_empty[rows.domains == domain]
            feature[f"empty in {domain}"] = int(of_domain.sum())
        described.append(feature)
    return pd.DataFrame(described)


def _span(values: np.ndarray) -> str:
    """The range and the mean of numbers, in words: '1 to 3, mean 2'."""
    return f"{values.min():g} to {values.max():g}, mean {values.mean():.4g}"


def _suspects(rows: Rows) -> list[tuple[str, str]]:
    """(column, sentence) of numbers that are one constant in a domain alone, or 0 far below all other values."""
    suspects = []
    for name in rows.columns.numbers:
        is_empty = rows.empty[name]
        numbers = _numbers(rows.cells[name], is_empty)
        places = rows.domains[~is_empty].to_numpy()
        if len(np.unique(numbers)) <= FEW_VALUES:
            continue
        sentences = _far_zeros(name, numbers, places) or _constants(name, numbers, places)
        suspects += [(name, sentence) for sentence in sentences]
    return suspects


def _far_zeros(name: str, numbers: np.ndarray, places: np.ndarray) -> list[str]:
    """A sentence where a column [N] is 0 in some rows and far above it in all others. places: their domains [N]"""
    is_zero = numbers == 0
    others = numbers[~is_zero]
    least = others.min()
    if not is_zero.any() or least <= GAP * (others.max() - least):
        return []
    shares = []
    for domain in sorted(set(places[is_zero])):
        is_here = places == domain
        zeros = is_zero & is_here
        shares.append(f"{zeros.sum()} of {is_here.sum()} rows of {domain}")
    hint = f'if 0 means that it was not measured, set missing = {{{name} = ["0"]}}'
    return [f"{name} is 0 in {', '.join(shares)}, and otherwise at least {least:g}: {hint}"]


def _constants(name: str, numbers: np.ndarray, places: np.ndarray) -> list[str]:
    """A sentence for each domain in which a column has one value alone."""
    sentences = []
    for domain in sorted(set(places)):
        values = numbers[places == domain]
        first = values[0]
        if len(values) > 1 and (values == first).all():
            sentences.append(f"{name} is {first:g} in all rows of {domain}, where it has a value at all")
    return sentences


def _tell_the_class(rows: Rows) -> list[str]:
    """The features that say the class of every row, because they are the label in other words."""
    names = []
    for name in rows.columns.features:
        values = rows.cells[name]
        classes = rows.labels.groupby(values).nunique()
        are_few = len(classes) <= MOST_VALUES and len(classes) < len(values) / FEW_VALUES
        if are_few and (classes == 1).all():
            names.append(name)
    return names


def _without(columns: Columns, names: Collection[str]) -> Columns:
    """The columns without these features; all of them where no feature would remain."""
    features = tuple(name for name in columns.features if name not in names)
    if not features:
        return columns
    categories = {name: values for name, values in columns.categories.items() if name in features}
    return replace(columns, features=features, categories=categories)


def _of_classes(rows: Rows, place: str, data: DataSettings) -> list[str]:
    """Sentences on domains that lack classes; UserError for a task of two classes with other labels, as in a run."""
    if data.task in OF_TENSORS:
        return []
    classes = sorted(rows.labels.unique(), key=class_order)
    if data.task == BINARY.name:
        named = data.model_copy(update={"root": place})
        row = replace(find_dataset("arrays"), classes=tuple(classes))
        with_task(row, named)
    counts = {}
    for domain, names in rows.labels.groupby(rows.domains):
        counts[str(domain)] = count_names(names.tolist())
    one_class = _one_class(rows)
    findings = class_findings(counts, place)
    if len(classes) == 2 and one_class:  # it says the same
        return one_class
    return one_class + [finding.line for finding in findings]


def _of_file_names(file: Path, columns: Columns) -> list[str]:
    """A sentence where a table has no column of domains, so that the names of files are those of domains."""
    if columns.domain in header_of(file):
        return []
    return [FILE_NAMES.format(column=columns.domain)]


def _of_cells(rows: Rows) -> list[str]:
    """Sentences on the cells of the features: odd texts, empty cells and equal rows."""
    return [*_odd_texts(rows), *_without_values(rows), *_equal_rows(rows)]


def _odd_texts(rows: Rows) -> list[str]:
    """Sentences on categories that differ in spelling only, and on texts of a feature that count as empty cells."""
    sentences = []
    for name in rows.columns.features:
        is_empty = rows.empty[name]
        texts = rows.cells.loc[is_empty, name]
        is_named = texts.isin(rows.columns.missing.get(name, ()))
        unnamed = texts[(texts != "") & ~is_named]
        for text, count in unnamed.value_counts().items():
            rows_of_text = "1 row" if count == 1 else f"{count} rows"
            sentences.append(f"{name} is {text!r} in {rows_of_text}, which counts as an empty cell")
        if name in rows.columns.categories:
            values = rows.cells.loc[~is_empty, name]
            counts = count_names(values.tolist())
            place = f"column {name!r}"
            sentences += lines_of(spelling_findings(counts, place))
            sentences += lines_of(number_findings(counts, place))
    return sentences


def _one_class(rows: Rows) -> list[str]:
    """A sentence for each domain whose rows are all of one class."""
    sentences = []
    for domain, names in rows.labels.groupby(rows.domains):
        if names.nunique() == 1:
            sentences.append(f"all {len(names)} rows of {domain} are of the class {names.iloc[0]}")
    return sentences


def _without_values(rows: Rows) -> list[str]:
    """Sentences on features that are empty in all rows of a domain, or in most of one and few of another."""
    domains = rows.domains
    sentences = []
    for name, cells in rows.empty.items():
        is_empty = pd.Series(cells, index=domains.index)
        shares = is_empty.groupby(domains).mean()
        bare = shares.index[shares == 1]
        if len(bare):
            sentences.append(f"{name} has no value in {', '.join(bare)}")
        least = str(shares.idxmin())
        mostly = shares.index[(shares >= MOSTLY_EMPTY) & (shares < 1)]
        if len(mostly) and shares[least] <= 1 - MOSTLY_EMPTY:
            full = _share_of_rows(cells, domains, least)
            places = ", ".join(_share_of_rows(cells, domains, domain) for domain in mostly)
            sentences.append(f"{name} is empty in {places}, and in {full}: {SAYS_WHICH}")
    return sentences


def _share_of_rows(cells: np.ndarray, domains: pd.Series, domain: str) -> str:
    """Says in how many of a domain's rows the flag of a cell [N] holds: '3 of 20 rows of Hungary'."""
    of_domain = cells[domains == domain]
    return f"{of_domain.sum()} of {len(of_domain)} rows of {domain}"


def _equal_rows(rows: Rows) -> list[str]:
    """Sentences on rows with equal cells in all features, in two domains or in one."""
    domains = rows.domains
    pairs: list[str] = []
    repeats: list[str] = []
    for first, *others in _positions_of_equals(rows):
        row = rows.place(first)
        elsewhere = []
        for position in others:
            other = rows.place(position)
            if domains[position] == domains[first]:
                repeats.append(f"{other} repeats {row}")
            else:
                elsewhere.append(f"{other} ({domains[position]})")
        for other in elsewhere[:1]:
            pair = f"{row} ({domains[first]}) and {other}"
            pairs.append(f"{pair} have equal features: is it one patient in two domains?")
    sentences = pairs[:SHOWN]
    more = len(pairs) - SHOWN
    if more > 0:
        sentences.append(f"and {more} more such pairs")
    if repeats:
        verb = "row repeats" if len(repeats) == 1 else "rows repeat"
        listed = joined_names(repeats, SHOWN)
        sentences.append(f"{len(repeats)} {verb} another one of their domain: {listed}")
    return sentences


def _positions_of_equals(rows: Rows) -> Iterable[list[int]]:
    """For all features' cells that occur, the positions of the rows that have them."""
    features = rows.cells[list(rows.columns.features)]
    positions: dict[tuple[str, ...], list[int]] = {}
    for position, cells in enumerate(features.itertuples(index=False, name=None)):
        positions.setdefault(cells, []).append(position)
    return positions.values()


def _experiment(
    path: Path, columns: Columns, is_folder: bool, suspects: Sequence[str], chosen: Mapping[str, object]
) -> str:
    """The text of an experiment file for the table."""
    label = list(columns.labels) if chosen.get("task") == MULTI_LABEL.name else columns.label
    named: dict[str, object] = {"label": label, "features": list(columns.features)}
    if not is_folder:
        named["domain"] = columns.domain
    if columns.group:
        named["group"] = columns.group
    if columns.split not in ("", "split"):  # the usual name is read without being named
        named["split"] = columns.split
    if columns.categories:
        named["categories"] = _lists(columns.categories)
    if columns.missing:
        named["missing"] = _lists(columns.missing)
    settings = {
        "data": {
            "dataset": "arrays",
            "root": str(path),
            **chosen,
            "split": "stratified",
            "holdout": 0.2,
            "columns": named,
        },
        "model": {
            "backbone": "mlp",
            "options": {"widths": [32], "norm": "batch"},
        },
        "train": {
            "rounds": 20,
            "batch_size": 16,
            "lr": 0.05,
            "momentum": 0.9,
        },
    }
    text = tomli_w.dumps(settings)
    text = text.replace("holdout = 0.2\n", f"holdout = 0.2\n{MISSING_LINE}\n", 1)
    text = text.replace('backbone = "mlp"\n', f'backbone = "mlp"  {TRY_LINEAR}\n', 1)
    if suspects:
        lines = "".join(f'# {name} = ["0"]\n' for name in suspects)
        text = text.replace("[model]\n", f"# [data.columns.missing]\n{lines}\n[model]\n", 1)
    return text


def _lists(values: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """The values of each column as lists, which TOML can hold."""
    return {name: list(of_column) for name, of_column in values.items()}


def inspect_npz(path: Path, data: DataSettings) -> TableInspection:
    """Inspects an .npz file: rows by domain and class, and shape and range of the values of each domain.

    data: settings with names of the arrays
    """
    data = data.model_copy(update={"root": str(path)})
    bench = benchmark(data)
    rows, counts = [], []
    for domain in bench.domains:
        values, labels = reader(data, bench).images(domain)
        row = {
            "domain": domain,
            "examples": len(values),
            "shape": list(bench.shape),
            "values": _span(values),
        }
        rows.append(row)
        counts.append(np.bincount(labels, minlength=len(bench.classes)))
    domains = pd.Index(bench.domains, name="domain")
    frame = pd.DataFrame(counts, index=domains, columns=list(bench.classes))
    backbone = "cnn-1d" if len(bench.shape) == 2 else "mlp"
    settings = {
        "data": {
            "dataset": "arrays",
            "root": str(path),
            "split": "stratified",
            "holdout": 0.2,
            "scale": "federated",
            **chosen_of(data),
            "columns": dict(data.columns),
        },
        "model": {
            "backbone": backbone,
            "options": {"norm": "batch"},
        },
        "train": {
            "rounds": 20,
            "batch_size": 32,
            "lr": 0.05,
            "momentum": 0.9,
        },
    }
    return TableInspection(
        counts=frame,
        columns=pd.DataFrame(rows),
        problems=[],
        experiment=tomli_w.dumps(settings),
    )
