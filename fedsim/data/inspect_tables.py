"""Inspects a table of numbers before training: rows, empty cells, suspicious values, and an experiment file for it."""

from collections.abc import Collection, Mapping, Sequence
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
from fedsim.data.findings import joined_names
from fedsim.data.label_findings import class_findings, count_names, spelling_findings
from fedsim.data.names import subfolders
from fedsim.data.reader import reader
from fedsim.data.tables import header_of, read_pieces
from fedsim.data.targets import STRATUM
from fedsim.data.text_table import SUFFIXES, Cells, TextTable
from fedsim.settings import DataSettings

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


def is_table_of_numbers(path: Path, data: DataSettings) -> bool:
    """Whether a path is a table, or a folder of tables alone, without image files and with a column of numbers."""
    files = tables_in(path)
    if not files or data.column("path", "path") in header_of(files[0]) or (path.is_dir() and subfolders(path)):
        return False
    first = next(read_pieces(files[0], header_of(files[0])), pd.DataFrame())
    named = {data.column(name, name) for name in ("domain", "split", "group")} | set(columns_of(data, {}).labels)
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
    files = tables_in(path)
    tables = [_with_domain(file, data) for file in files]
    rows = pd.concat(tables, ignore_index=True)
    columns = with_features(columns_of(data, {}), rows.columns, path)
    columns, left_out = _with_kinds(columns, rows)
    domains = _named(text_of_names(Cells.of(rows[columns.domain])), rows)
    has_targets = data.task in OF_TENSORS
    labels = _labels(path, columns, rows, data.task)
    cells = TextTable.of(rows)
    empty = {name: columns.empty(cells, name) for name in columns.features}
    suspects = _suspects(columns, rows, domains, empty)
    problems = _of_file_names(files[0], columns) + left_out + [text for _, text in suspects]
    telling = [] if has_targets else _tell_the_class(columns, rows, labels)
    problems += [f"{name} {TELLS}" for name in telling]
    problems += _of_classes(labels, domains, f"{path}, column {columns.label!r}", data)
    problems += _of_cells(columns, rows, domains, empty)
    return TableInspection(
        _counts(labels, domains),
        _described(columns, rows, domains, empty),
        problems,
        _experiment(path, _without(columns, telling), len(files) > 1, [name for name, _ in suspects], data.task),
    )


def _labels(path: Path, columns: Columns, rows: pd.DataFrame, task: str) -> pd.Series:
    """The class of each row; one and the same where the targets are numbers or several labels, which are checked."""
    if task not in OF_TENSORS:
        return _named(names_of_labels(Cells.of(rows[columns.label]), f"{path}, column {columns.label!r}"), rows)
    for name in columns.labels:
        targets_of(Cells.of(rows[name]), task, f"{path}, column {name!r}")
    return pd.Series(STRATUM, index=rows.index)


def _named(names: np.ndarray, rows: pd.DataFrame | pd.Series) -> pd.Series:
    return pd.Series(names, index=rows.index)


def _with_domain(file: Path, data: DataSettings) -> pd.DataFrame:
    """A table with its column of domains; in a folder of tables it may be the name of the file."""
    table, columns = read_table(file).frame(), columns_of(data, {})
    for name, key in (*((label, "label") for label in columns.labels), (columns.domain, "domain")):
        may_be_file_name = key == "domain" and "domain" not in data.columns and len(tables_in(file.parent)) > 1
        if name not in table and not may_be_file_name:
            raise UserError(f"{file} has no column {name!r}; say which one it is with --set data.columns.{key}=NAME; "
                            f"it has: {', '.join(table.columns)}")  # fmt: skip
    return table if columns.domain in table else table.assign(**{columns.domain: file.stem})


def _with_kinds(columns: Columns, rows: pd.DataFrame) -> tuple[Columns, list[str]]:
    """The columns with every column of texts among the categories, and sentences on those that are no features."""
    categories = {name: columns.categories.get(name, ()) for name in columns.categories}
    features, left_out = [], []
    for name in columns.features:
        cells = rows.loc[~columns.empty(TextTable.of(rows), name), name]
        values = cells.unique()
        is_text = bool(_as_numbers(cells).isna().any())
        if len(values) == len(rows) and (is_text or _counts_up(cells)):
            left_out.append(f"{name} has another value in every row; it is left out of the features")
        elif name not in categories and is_text and len(values) > MOST_VALUES:
            left_out.append(f"{name} has {_texts_and_numbers(cells)}; it is left out of the features")
        else:
            features.append(name)
            if is_text or name in categories:
                categories[name] = categories.get(name) or tuple(sorted(values))
    if not features:
        raise UserError("the table has no column that can be a feature: each has another text in every row")
    return replace(columns, features=tuple(features), categories=categories), left_out


def _texts_and_numbers(cells: pd.Series) -> str:
    """Says how many different texts a column has; where few rows have no number, which the first of them is."""
    texts = cells[_as_numbers(cells).isna()]
    if len(texts) > len(cells) / FEW_VALUES:
        return f"{cells.nunique()} different texts"
    others = "1 text:" if len(texts) == 1 else f"{len(texts)} texts, such as"
    first = texts.iloc[0]
    remedy = f"correct it, or name it with data.columns.missing = {{{texts.name} = ['{first}']}}"
    return f"{len(cells) - len(texts)} numbers and {others} {first!r} in row {texts.index[0] + 2}; {remedy}"


def _counts_up(cells: pd.Series) -> bool:
    """Whether the cells are 1, 2, 3, ... or another row of consecutive whole numbers."""
    numbers = pd.to_numeric(cells, errors="coerce")
    return bool((numbers.diff().iloc[1:] == 1).all()) and len(cells) > FEW_VALUES


def _numbers(cells: pd.Series, empty: np.ndarray) -> np.ndarray:
    """The values of a column of numbers that are not empty."""
    return _as_numbers(cells[~empty]).to_numpy(dtype=np.float64)


def _as_numbers(cells: pd.Series) -> pd.Series:
    """The cells as numbers, true and false as 1 and 0; a text that is no number is NaN."""
    texts = cells.str.lower().replace(TRUTHS)
    return pd.to_numeric(texts, errors="coerce")


def _counts(labels: pd.Series, domains: pd.Series) -> pd.DataFrame:
    """Rows by domain and class."""
    table = pd.crosstab(domains.rename("domain"), labels.rename(None))
    return table[sorted(table.columns, key=class_order)]


def _described(
    columns: Columns, rows: pd.DataFrame, domains: pd.Series, empty: Mapping[str, np.ndarray]
) -> pd.DataFrame:
    """A row for each feature: kind, values, and empty cells in each domain."""
    described = []
    for name in columns.features:
        if name in columns.categories:
            kind, values = "category", ", ".join(columns.categories[name])
        else:
            numbers = _numbers(rows[name], empty[name])
            kind = "number"
            values = f"{numbers.min():g} to {numbers.max():g}, mean {numbers.mean():.4g}" if len(numbers) else "-"
        cells = {f"empty in {domain}": int(empty[name][domains == domain].sum()) for domain in sorted(domains.unique())}
        described.append({"column": name, "kind": kind, "values": values, **cells})
    return pd.DataFrame(described)


def _suspects(
    columns: Columns, rows: pd.DataFrame, domains: pd.Series, empty: Mapping[str, np.ndarray]
) -> list[tuple[str, str]]:
    """(column, sentence) of numbers that are one constant in a domain alone, or 0 far below all other values."""
    suspects = []
    for name in columns.numbers:
        numbers = _numbers(rows[name], empty[name])
        places = domains[~empty[name]].to_numpy()
        if len(np.unique(numbers)) > FEW_VALUES:
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
        here = places == domain
        shares.append(f"{(is_zero & here).sum()} of {here.sum()} rows of {domain}")
    hint = f'if 0 means that it was not measured, set missing = {{{name} = ["0"]}}'
    return [f"{name} is 0 in {', '.join(shares)}, and otherwise at least {least:g}: {hint}"]


def _constants(name: str, numbers: np.ndarray, places: np.ndarray) -> list[str]:
    """A sentence for each domain in which a column has one value alone."""
    sentences = []
    for domain in sorted(set(places)):
        values = numbers[places == domain]
        if len(values) > 1 and (values == values[0]).all():
            sentences.append(f"{name} is {values[0]:g} in all rows of {domain}, where it has a value at all")
    return sentences


def _tell_the_class(columns: Columns, rows: pd.DataFrame, labels: pd.Series) -> list[str]:
    """The features that say the class of every row, because they are the label in other words."""
    names = []
    for name in columns.features:
        classes = labels.groupby(rows[name]).nunique()
        if len(classes) <= MOST_VALUES and len(classes) < len(rows) / FEW_VALUES and (classes == 1).all():
            names.append(name)
    return names


def _without(columns: Columns, names: Collection[str]) -> Columns:
    """The columns without these features; all of them where no feature would remain."""
    features = tuple(name for name in columns.features if name not in names)
    if not features:
        return columns
    categories = {name: values for name, values in columns.categories.items() if name in features}
    return replace(columns, features=features, categories=categories)


def _of_classes(labels: pd.Series, domains: pd.Series, place: str, data: DataSettings) -> list[str]:
    """Sentences on domains that lack classes; UserError for a task of two classes with other labels, as in a run."""
    if data.task in OF_TENSORS:
        return []
    classes = sorted(labels.unique(), key=class_order)
    if data.task == BINARY.name:
        named = data.model_copy(update={"root": place})
        with_task(replace(find_dataset("arrays"), classes=tuple(classes)), named)
    counts = {str(domain): count_names(names.tolist()) for domain, names in labels.groupby(domains)}
    one_class = _one_class(labels, domains)
    findings = class_findings(counts, place)
    if len(classes) == 2 and one_class:  # it says the same
        return one_class
    return one_class + [finding.line for finding in findings]


def _of_file_names(file: Path, columns: Columns) -> list[str]:
    """A sentence where a table has no column of domains, so that the names of files are those of domains."""
    if columns.domain in header_of(file):
        return []
    return [FILE_NAMES.format(column=columns.domain)]


def _of_cells(columns: Columns, rows: pd.DataFrame, domains: pd.Series, empty: Mapping[str, np.ndarray]) -> list[str]:
    """Sentences on the cells of the features: odd texts, empty cells and equal rows."""
    odd = _odd_texts(columns, rows, TextTable.of(rows))
    return [*odd, *_without_values(domains, empty), *_equal_rows(columns, rows, domains)]


def _odd_texts(columns: Columns, rows: pd.DataFrame, cells: TextTable) -> list[str]:
    """Sentences on categories that differ in spelling only, and on texts of a feature that count as empty cells."""
    sentences = []
    for name in columns.features:
        texts = rows.loc[columns.empty(cells, name), name]
        unnamed = texts[(texts != "") & ~texts.isin(columns.missing.get(name, ()))]
        for text, count in unnamed.value_counts().items():
            rows_of_text = "1 row" if count == 1 else f"{count} rows"
            sentences.append(f"{name} is {text!r} in {rows_of_text}, which counts as an empty cell")
        if name in columns.categories:
            counts = count_names(rows.loc[~columns.empty(cells, name), name].tolist())
            sentences += [finding.line for finding in spelling_findings(counts, f"column {name!r}")]
    return sentences


def _one_class(labels: pd.Series, domains: pd.Series) -> list[str]:
    sentences = []
    for domain, names in labels.groupby(domains):
        if names.nunique() == 1:
            sentences.append(f"all {len(names)} rows of {domain} are of the class {names.iloc[0]}")
    return sentences


def _without_values(domains: pd.Series, empty: Mapping[str, np.ndarray]) -> list[str]:
    """Sentences on features that are empty in all rows of a domain, or in most of one and few of another."""
    sentences = []
    for name, cells in empty.items():
        shares = _named(cells, domains).groupby(domains).mean()
        bare = [str(domain) for domain in shares.index[shares == 1]]
        if bare:
            sentences.append(f"{name} has no value in {', '.join(bare)}")
        least = str(shares.idxmin())
        mostly = [str(domain) for domain in shares.index[(shares >= MOSTLY_EMPTY) & (shares < 1)]]
        if mostly and shares[least] <= 1 - MOSTLY_EMPTY:
            full = _share_of_rows(cells, domains, least)
            places = ", ".join(_share_of_rows(cells, domains, domain) for domain in mostly)
            sentences.append(f"{name} is empty in {places}, and in {full}: {SAYS_WHICH}")
    return sentences


def _share_of_rows(cells: np.ndarray, domains: pd.Series, domain: str) -> str:
    """Says in how many of a domain's rows the flag of a cell [N] holds: '3 of 20 rows of Hungary'."""
    of_domain = cells[domains == domain]
    return f"{of_domain.sum()} of {len(of_domain)} rows of {domain}"


def _equal_rows(columns: Columns, rows: pd.DataFrame, domains: pd.Series) -> list[str]:
    """Sentences on rows with equal cells in all features, in two domains or in one."""
    seen: dict[tuple[str, ...], list[int]] = {}
    for position, cells in enumerate(rows[list(columns.features)].itertuples(index=False, name=None)):
        seen.setdefault(cells, []).append(position)
    sentences: list[str] = []
    within: list[str] = []
    for first, *others in seen.values():
        apart = [position for position in others if domains[position] != domains[first]]
        within += [f"row {position + 2} repeats row {first + 2}" for position in others if position not in apart]
        for position in apart[:1]:
            pair = f"row {first + 2} ({domains[first]}) and row {position + 2} ({domains[position]})"
            sentences.append(f"{pair} have equal features: is it one patient in two domains?")
    more = len(sentences) - SHOWN
    sentences = sentences[:SHOWN] + ([f"and {more} more such pairs"] if more > 0 else [])
    if within:
        count = f"{len(within)} {'row repeats' if len(within) == 1 else 'rows repeat'} another one of their domain"
        sentences.append(f"{count}: {joined_names(within, SHOWN)}")
    return sentences


def _experiment(path: Path, columns: Columns, is_folder: bool, suspects: Sequence[str], task: str) -> str:
    """The text of an experiment file for the table."""
    label = list(columns.labels) if task == MULTI_LABEL.name else columns.label
    named: dict[str, object] = {"label": label, "features": list(columns.features)}
    if not is_folder:
        named["domain"] = columns.domain
    if columns.group:
        named["group"] = columns.group
    if columns.categories:
        named["categories"] = {name: list(values) for name, values in columns.categories.items()}
    if missing := {name: list(values) for name, values in columns.missing.items()}:
        named["missing"] = missing
    chosen = {"task": task} if task else {}
    settings = {
        "data": {
            "dataset": "arrays",
            "root": str(path),
            **chosen,
            "split": "stratified",
            "holdout": 0.2,
            "columns": named,
        },
        "model": {"backbone": "mlp", "options": {"widths": [32], "norm": "batch"}},
        "train": {"rounds": 20, "batch_size": 16, "lr": 0.05, "momentum": 0.9},
    }
    text = tomli_w.dumps(settings)
    text = text.replace("holdout = 0.2\n", f"holdout = 0.2\n{MISSING_LINE}\n", 1)
    text = text.replace('backbone = "mlp"\n', f'backbone = "mlp"  {TRY_LINEAR}\n', 1)
    if suspects:
        lines = "".join(f'# {name} = ["0"]\n' for name in suspects)
        text = text.replace("[model]\n", f"# [data.columns.missing]\n{lines}\n[model]\n", 1)
    return text


def inspect_npz(path: Path, data: DataSettings) -> TableInspection:
    """Inspects an .npz file: rows by domain and class, and shape and range of the values of each domain.

    data: settings with names of the arrays
    """
    data = data.model_copy(update={"root": str(path)})
    bench = benchmark(data)
    rows, counts = [], []
    for domain in bench.domains:
        values, labels = reader(data, bench).images(domain)
        span = f"{values.min():g} to {values.max():g}, mean {values.mean():.4g}"
        rows.append({"domain": domain, "examples": len(values), "shape": list(bench.shape), "values": span})
        counts.append(np.bincount(labels, minlength=len(bench.classes)))
    frame = pd.DataFrame(counts, index=pd.Index(bench.domains, name="domain"), columns=list(bench.classes))
    settings = {
        "data": {
            "dataset": "arrays",
            "root": str(path),
            "split": "stratified",
            "holdout": 0.2,
            "scale": "federated",
            "columns": dict(data.columns),
        },
        "model": {"backbone": "cnn-1d" if len(bench.shape) == 2 else "mlp", "options": {"norm": "batch"}},
        "train": {"rounds": 20, "batch_size": 32, "lr": 0.05, "momentum": 0.9},
    }
    return TableInspection(frame, pd.DataFrame(rows), [], tomli_w.dumps(settings))
