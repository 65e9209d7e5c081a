"""Images named by a table: CSV, TSV or Parquet, a row per image, with the columns path, label, domain, perhaps split.

A table is read in pieces, so that opening one of a million rows takes seconds and little memory.
"""

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedsim.common.about import optional
from fedsim.common.errors import UserError, first_line, nearest
from fedsim.data.cache import Entry
from fedsim.data.findings import Finding
from fedsim.data.folders import Listing
from fedsim.data.image_tree import ImageTree
from fedsim.data.label_findings import label_findings, name_findings, one_hot_hint
from fedsim.data.levels import split_domains
from fedsim.data.lists import PARTS, reads_lists
from fedsim.data.names import composed, read_from, refuse_alike, used_of
from fedsim.data.pixels import MissingImageError
from fedsim.data.reader import Reader, numbers_of_groups
from fedsim.data.row import Benchmark
from fedsim.data.table_paths import advice
from fedsim.data.text_table import SUFFIXES
from fedsim.settings import DataSettings, data_root

COLUMNS = ("path", "label", "domain", "split", "group")
PIECE = 20_000  # rows read at a time
FIRST_ROW = 2  # as an editor counts: the header is row 1
ODD_PATH = r"^/|//|(?:^|/)\.{1,2}/"  # a path that another one may spell in a shorter way


@dataclass(frozen=True)
class Facts:
    """The facts of a whole table: the number of images by (domain, class)."""

    counts: Mapping[tuple[str, str], int]
    splits: Mapping[str, int] | None  # images by known word of the column `split`; None without it


def discover(data: DataSettings, row: Benchmark) -> Benchmark:
    """The row with the table's domains, and the classes of those that are used; `data.classes` may add classes.

    Raises UserError for a missing or unreadable file, a missing column, an empty cell and fewer than two classes.
    """
    facts_of_table = facts(data)
    return named(row, data, facts_of_table.counts, (), facts_of_table.splits or {}, table_file(data))


def named(
    row: Benchmark,
    data: DataSettings,
    pairs: Iterable[tuple[str, str]],
    classes: Iterable[str],
    splits: Mapping[str, int],
    where: object,
) -> Benchmark:
    """The row with the names of a column of domains and one of labels.

    pairs: every (domain, label) that occurs; classes: those that are known without images; splits: the images of each
    """
    labels_of: dict[str, set[str]] = {}
    for domain, label in pairs:
        labels_of.setdefault(domain, set()).add(label)
    domains = tuple(sorted(labels_of))
    labels = [labels_of[name] for name in used_of(domains, data.domains)]
    names = tuple(sorted(set(map(composed, [*classes, *data.classes])).union(*labels)))
    refuse_alike([*labels, *([name] for name in names)], "labels", where)
    if not data.domains:
        refuse_alike([[name] for name in domains], "domains", where)
    if len(names) < 2:
        raise UserError(f"{where}: {len(names)} class(es) in the column of labels; at least 2 are needed")
    splits = {} if reads_lists(data) else splits
    joined = tuple(f"{name} ({count:,} images)" for name, count in splits.items()) if len(splits) > 1 else ()
    return replace(row, domains=domains, classes=names, joined=joined)


class TableReader(ImageTree):
    """Reads the images that a table names through the cache; paths are relative to the table's folder."""

    takes_lists = False  # a column says it

    def find(self) -> None:
        """The table must be there."""
        table_file(self.data)

    def listing(self, domain: str) -> Listing:
        """The files of a domain by class, then by path, independent of the order of the rows."""
        rows = self._rows(domain)
        return Listing(table_file(self.data).parent, tuple(rows["path"]), rows["label"].to_numpy(np.int64))

    def labels(self, domain: str) -> np.ndarray:
        """Only the labels, from the counts of the classes."""
        counts = facts(self.data).counts
        return np.repeat(np.arange(len(self.found.classes)), [counts.get((domain, c), 0) for c in self.found.classes])

    def listed(self, domain: str, part: str) -> np.ndarray | None:
        """Indices of the images whose split is `part`; None when no row of the domain has it."""
        chosen = np.flatnonzero(self._parts(domain) == part)
        return chosen if len(chosen) else None

    def groups(self, domain: str) -> np.ndarray | None:
        """The numbers int64 [N] of the values of the column `data.columns.group`; None where it names none."""
        if "group" not in self.data.columns:
            return Reader.groups(self, domain)
        return numbers_of_groups(self._rows(domain)["group"])

    def findings(self) -> list[Finding]:
        """What the labels and the domains of the table show; the folders of its files say nothing about its rows."""
        file, column = table_file(self.data), self.data.column("domain", "domain")
        labels: Counter[str] = Counter()
        domains: Counter[str] = Counter()
        for (domain, label), count in facts(self.data).counts.items():
            domains[domain] += count
            labels[label] += count if domain in self.found.domains else 0
        remedy = "name the columns of the domains and of the parts in data.columns.domain and data.columns.split"
        return [
            *label_findings(+labels, file, self.data.column("label", "label"), self._first_row_of("label")),
            *name_findings(domains, file, column, self._first_row_of("domain")),
            *split_domains(self.found.domains, file, remedy),
        ]

    def missing_text(self, domain: str) -> str:
        """Says which row of a domain is the first one without a file, why, and how many there are; empty for none."""
        folder = table_file(self.data).parent
        paths = self._rows(domain)["path"]
        missing = [path for path in paths if not (folder / path).exists()]
        if not missing:
            return ""
        row = self._first_row_of("path")(missing[0])
        column = self.data.column("path", "path")
        count = f"{len(missing):,} of {len(paths):,} files of {domain} are not there; "
        where = f"{table_file(self.data)}, row {row}, column {column!r}"
        return f"{where}: no file {missing[0]!r} in {folder.absolute()}; {count}{advice(folder, missing[0])}"

    def _entry(self, domain: str) -> Entry:
        """A domain's place in the cache; UserError with the row for a file that is not there."""
        entry = super()._entry(domain)
        try:
            _ = entry.manifest  # which looks at every file
        except MissingImageError:
            raise UserError(self.missing_text(domain)) from None
        return entry

    def _first_row_of(self, name: str) -> Callable[[str], int]:
        """A function that gives the number of the first row with a value of one of our columns."""

        def first_row(value: str) -> int:
            row = FIRST_ROW
            for piece in pieces(table_file(self.data), dict(_source(self.data)[2]), (name,)):
                places = np.flatnonzero(piece[name] == value)
                if len(places):
                    return row + int(places[0])
                row += len(piece)
            return 0

        return first_row

    def unlisted(self, domain: str, part: str) -> str:
        """No row of the domain has the part."""
        column = self.data.column("split", "split")
        return f"{table_file(self.data)}: no row of domain {domain!r} has {part!r} in the column {column!r}; name some"

    def _lists(self, domain: str) -> list[bytes]:
        return ["\0".join(self._parts(domain)).encode()]

    def _parts(self, domain: str) -> pd.Series:
        """The part of every row of a domain: train, validation, test, or an empty text, which is none of them."""
        file, column = table_file(self.data), self.data.column("split", "split")
        if facts(self.data).splits is None:
            raise UserError(f"{file} has no column {column!r}, which data.split = 'lists' and data.test_split = 'list' "
                            "read")  # fmt: skip
        texts = self._rows(domain)["split"]
        unknown = sorted(set(texts) - {"", *PARTS})
        if unknown:
            raise UserError(f"{file}: {unknown[0]!r} in the column {column!r} of domain {domain!r} is none of "
                            f"{', '.join(PARTS)}; {nearest(unknown[0], PARTS)}leave the cell empty for an unused "
                            "image")  # fmt: skip
        return texts.map(PARTS).fillna("")

    def _rows(self, domain: str) -> pd.DataFrame:
        """Path, label (index of the class) and split of a domain's rows, sorted by label and path."""
        rows = _rows_of(*_source(self.data), domain)
        return rows.assign(label=rows["label"].map({name: index for index, name in enumerate(self.found.classes)}))


def table_file(data: DataSettings) -> Path:
    """The table: `data.root` itself."""
    file = data_root(data)
    if not file.exists():
        raise UserError(f"data.root: no file {file}{read_from(file)}; name the table's file")
    if not file.is_file() or file.suffix.lower() not in SUFFIXES:
        raise UserError(f"data.root: {file} is no table; name a file that ends in {', '.join(SUFFIXES)}")
    return file


def facts(data: DataSettings) -> Facts:
    """Facts of the settings' table, read once per process and version of the file."""
    return _facts(*_source(data))


def _source(data: DataSettings) -> tuple[Path, tuple[int, int], tuple[tuple[str, str], ...]]:
    """The table, the version of its file, and the names of its columns."""
    file = table_file(data)
    status = file.stat()
    return (
        file,
        (status.st_size, status.st_mtime_ns),
        tuple(sorted((name, data.column(name, name)) for name in data.columns)),
    )


@functools.lru_cache(maxsize=8)
def _facts(file: Path, version: tuple[int, int], columns: tuple[tuple[str, str], ...]) -> Facts:
    counts: Counter[tuple[str, str]] = Counter()
    splits: Counter[str] | None = None
    _refuse_numbers(file, dict(columns))
    for piece in pieces(file, dict(columns), ("label", "domain", "split")):
        if "split" in piece:
            splits = (splits or Counter()) + Counter(piece["split"])
        counts.update(piece.groupby(["domain", "label"], sort=False, observed=True).size().to_dict())
    if not counts:
        raise UserError(f"{file} has no rows")
    counts_of_parts = None if splits is None else {name: splits[name] for name in sorted(splits) if name in PARTS}
    return Facts(dict(counts), counts_of_parts)


def _refuse_numbers(file: Path, columns: Mapping[str, str]) -> None:
    """UserError for a table without names of files, whose rows are examples by themselves."""
    _names_in_file(file, columns, ("label", "domain", "path"))
    first = next(pieces(file, columns, ("path",)), pd.DataFrame({"path": []}))["path"]
    if len(first) and pd.to_numeric(first, errors="coerce").notna().all():
        name = columns.get("path", "path")
        raise UserError(f"{file}: the column {name!r} holds numbers and no names of files; for a table of numbers set "
                        "data.dataset = 'arrays'")  # fmt: skip


@functools.lru_cache(maxsize=16)
def _rows_of(file: Path, version: tuple[int, int], columns: tuple[tuple[str, str], ...], domain: str) -> pd.DataFrame:
    _refuse_doubles(file, version, columns)
    of_domain = [piece[piece["domain"] == domain] for piece in pieces(file, dict(columns), COLUMNS)]
    return pd.concat(of_domain, ignore_index=True).sort_values(["label", "path"], ignore_index=True)


@functools.lru_cache(maxsize=8)
def _refuse_doubles(file: Path, version: tuple[int, int], columns: tuple[tuple[str, str], ...]) -> None:
    """UserError when two rows of any domains name one file, in one spelling or in two ('a/x.png' and './a/x.png').

    Such an image could train in one domain and be tested in the other. Only hashes of all paths are kept in memory.
    """
    hashes = np.concatenate([pd.util.hash_array(paths) for paths in _files(file, columns)])
    order = np.argsort(hashes, kind="stable")
    alike = set(order[1:][hashes[order[1:]] == hashes[order[:-1]]].tolist())
    if not alike:
        return
    suspected, row = set(hashes[list(alike)].tolist()), 2  # the header is line 1
    seen: dict[str, int] = {}
    for paths in _files(file, columns):
        for number in np.flatnonzero(np.isin(hashes[row - 2 : row - 2 + len(paths)], list(suspected))):
            first = seen.setdefault(paths[number], row + int(number))
            if first != row + number:
                raise UserError(f"{file}: {paths[number]!r} has more than one row (rows {first} and {row + number}); "
                                "keep one")  # fmt: skip
        row += len(paths)


def _files(file: Path, columns: tuple[tuple[str, str], ...]) -> Iterator[np.ndarray]:
    """The paths of a table as seen from its folder, each file in one spelling, some rows at a time."""
    for piece in pieces(file, dict(columns), ("path",)):
        paths = piece["path"].to_numpy(dtype=object)
        for index in np.flatnonzero(piece["path"].str.contains(ODD_PATH)):
            paths[index] = os.path.relpath(file.parent / paths[index], file.parent)
        yield paths


def pieces(file: Path, columns: Mapping[str, str], wanted: tuple[str, ...]) -> Iterator[pd.DataFrame]:
    """The wanted columns of a table under our names, as text, some rows at a time.

    A missing `split`, and a `group` that the settings do not name, are left out.
    """
    names = _names_in_file(file, columns, wanted)
    row = FIRST_ROW
    for raw in read_pieces(file, list(dict.fromkeys(names.values()))):
        piece = pd.DataFrame({name: raw[theirs].astype(str).str.strip() for name, theirs in names.items()})
        _refuse_empty(file, piece, raw, names, row)
        for name in ("label", "domain"):
            if name in piece:
                piece[name] = piece[name].map({text: composed(text) for text in piece[name].unique()})
        if "split" in piece:
            piece["split"] = piece["split"].str.lower().mask(raw[names["split"]].isna(), "")
        yield piece
        row += len(piece)


def _names_in_file(file: Path, columns: Mapping[str, str], wanted: tuple[str, ...]) -> dict[str, str]:
    """{our name: the file's} of the wanted columns that the file has; UserError for a missing or repeated one."""
    unknown = [name for name in columns if name not in COLUMNS]
    if unknown:
        raise UserError(f"data.columns: no column {unknown[0]!r}; {nearest(unknown[0], COLUMNS)}known: "
                        f"{', '.join(COLUMNS)}")  # fmt: skip
    present = header_of(file)
    names = {name: columns.get(name, name) for name in wanted if name != "group" or name in columns}
    for name, theirs in names.items():
        if theirs not in present and (name != "split" or name in columns):
            hint = "; a table of numbers is data.dataset = 'arrays'" if name == "path" else ""
            if name == "label":
                hint = one_hot_hint(next(read_pieces(file, present), pd.DataFrame()))
            raise UserError(f"{file} has no column {theirs!r}; {nearest(theirs, present)}it has: {', '.join(present)}; "
                            f"name it with data.columns.{name}{hint}")  # fmt: skip
        if present.count(theirs) > 1:
            raise UserError(f"{file} has {present.count(theirs)} columns {theirs!r}; remove or rename all but one")
    return {name: theirs for name, theirs in names.items() if theirs in present}


def _refuse_separator(file: Path, header: Sequence[str]) -> None:
    """UserError for a text with one column, whose name has another separator between what look like names."""
    if len(header) == 1 and (signs := [sign for sign in (";", "\t", "|", ",") if sign in header[0]]):
        usual = "tabs" if file.suffix.lower() == ".tsv" else "commas"
        separator = "tabs" if signs[0] == "\t" else repr(signs[0])
        raise UserError(
            f"{file}: its columns are separated by {separator} ({header[0]!r}), and a {file.suffix} file has {usual}; "
            "save it with commas as .csv, or with tabs as .tsv"
        )


def _refuse_empty(file: Path, piece: pd.DataFrame, raw: pd.DataFrame, names: Mapping[str, str], row: int) -> None:
    """UserError for an empty cell in a column that needs a value. row: the number of the piece's first row."""
    for name in piece.columns.difference(["split"]):
        empty = np.flatnonzero(raw[names[name]].isna() | (piece[name] == ""))
        if len(empty):
            raise UserError(f"{file}, row {row + empty[0]}: the column {names[name]!r} is empty")


def header_of(file: Path) -> list[str]:
    """The names of a table's columns, in order; a name that is there twice is in the list twice.

    Raises UserError for a text whose columns are separated by another sign.
    """
    with _refusals(file):
        if file.suffix.lower() == ".parquet":
            return list(_parquet(file).schema_arrow.names)
        # Not as a header, because pandas renames the second of two equal names.
        header = list(_text(file, header=None, nrows=1).iloc[0])
    _refuse_separator(file, header)
    return header


def read_pieces(file: Path, columns: list[str]) -> Iterator[pd.DataFrame]:
    """The columns of a table, some rows at a time: cells of CSV as text, those of Parquet as they are."""
    with _refusals(file):
        if file.suffix.lower() == ".parquet":
            for batch in _parquet(file).iter_batches(PIECE, columns=columns):
                yield batch.to_pandas()
            return
        # All columns are read, because pandas does not count a row's fields when it is asked for some of them.
        with _text(file, chunksize=PIECE) as reader:
            for piece in reader:
                if not isinstance(piece.index, pd.RangeIndex):  # pandas takes the first field as a name of the row
                    raise ValueError(f"row 2 has more fields than the header, which has {piece.shape[1]}")
                yield piece


@contextmanager
def _refusals(file: Path) -> Iterator[None]:
    """Turns the errors of a table that cannot be read into a UserError."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read the table {file} ({first_line(error)}); it must be UTF-8 text with a header, or Parquet"
        ) from None


def _text(file: Path, **options: Any) -> Any:
    separator = "\t" if file.suffix.lower() == ".tsv" else ","
    return pd.read_csv(file, sep=separator, encoding="utf-8-sig", dtype=str, keep_default_na=False, **options)


def _parquet(file: Path) -> Any:
    return optional("pyarrow.parquet", "a Parquet table needs pyarrow", "parquet").ParquetFile(file)
