"""Images named by a table: CSV, TSV or Parquet, a row per image, with the columns path, label, domain, perhaps split.

A table is read in pieces, so that opening one of a million rows takes seconds and little memory.
"""

import csv
import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import pandas as pd

from fedsim.common.about import optional
from fedsim.common.errors import UserError, first_line, nearest
from fedsim.data.cache import Entry
from fedsim.data.findings import Finding
from fedsim.data.folders import Listing, is_image
from fedsim.data.image_tree import ImageTree
from fedsim.data.label_findings import label_findings, name_findings, one_hot_hint
from fedsim.data.levels import split_domains
from fedsim.data.lists import PARTS, reads_lists
from fedsim.data.names import composed, read_from, refuse_alike, used_of
from fedsim.data.pixels import MissingImageError
from fedsim.data.reader import Reader, numbers_of_groups
from fedsim.data.row import Benchmark
from fedsim.data.text_table import FIRST_ROW, SUFFIXES, numbers_of_rows
from fedsim.settings import DataSettings, data_root
from fedsim.settings.data import start_folder

COLUMNS = ("path", "label", "domain", "split", "group")
PIECE = 20_000  # rows read at a time
ODD_PATH = r"^/|//|(?:^|/)\.{1,2}/"  # a path that another one may spell in a shorter way
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
DRIVE = re.compile(r"^[A-Za-z]:/*")
LEVELS_UP = 3  # of the folders above the table's that are looked at for a file
Version = tuple[int, int]  # size and time of a file
Names = tuple[tuple[str, str], ...]  # (our name, the file's) of columns


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
    without_images = map(composed, [*classes, *data.classes])
    names = tuple(sorted(set(without_images).union(*labels)))
    alone = [{name} for name in names]
    refuse_alike(labels + alone, "labels", where)
    if not data.domains:
        refuse_alike([[name] for name in domains], "domains", where)
    if len(names) < 2:
        raise UserError(f"{where}: {len(names)} class(es) in the column of labels; at least 2 are needed")
    return replace(row, domains=domains, classes=names, joined=_joined(splits, data))


def _joined(splits: Mapping[str, int], data: DataSettings) -> tuple[str, ...]:
    """The parts of a split with their images, in words, where there are several that the settings do not ask for."""
    if len(splits) < 2 or reads_lists(data):
        return ()
    return tuple(f"{name} ({count:,} images)" for name, count in splits.items())


class TableReader(ImageTree):
    """Reads the images that a table names through the cache; paths are relative to the table's folder."""

    takes_lists = False  # a column says it

    def find(self) -> None:
        """The table must be there."""
        table_file(self.data)

    def listing(self, domain: str) -> Listing:
        """The files of a domain by class, then by path, independent of the order of the rows."""
        rows = self._rows(domain)
        return Listing(
            folder=table_file(self.data).parent,
            files=tuple(rows["path"]),
            labels=rows["label"].to_numpy(np.int64),
        )

    def labels(self, domain: str) -> np.ndarray:
        """Only the labels, from the counts of the classes."""
        counts = facts(self.data).counts
        classes = self.found.classes
        images = [counts.get((domain, name), 0) for name in classes]
        return np.repeat(np.arange(len(classes)), images)

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
        file = table_file(self.data)
        labels: Counter[str] = Counter()
        domains: Counter[str] = Counter()
        for (domain, label), count in facts(self.data).counts.items():
            domains[domain] += count
            labels[label] += count if domain in self.found.domains else 0
        column = self.data.column("label", "label")
        findings = label_findings(+labels, file, column, self._first_row_of("label"))
        column = self.data.column("domain", "domain")
        findings += name_findings(domains, file, column, self._first_row_of("domain"))
        remedy = "name the columns of the domains and of the parts in data.columns.domain and data.columns.split"
        findings += split_domains(self.found.domains, file, remedy)
        return findings

    def missing_text(self, domain: str) -> str:
        """Says which row of a domain is the first one without a file, why, and how many there are; empty for none."""
        file = table_file(self.data)
        folder = file.parent
        paths = self._rows(domain)["path"]
        missing = [path for path in paths if not (folder / path).exists()]
        if not missing:
            return ""
        first = missing[0]
        first_row = self._first_row_of("path")
        column = self.data.column("path", "path")
        where = f"{file}, row {first_row(first)}, column {column!r}"
        fault = f"no file {first!r} in {folder.absolute()}"
        count = f"{len(missing):,} of {len(paths):,} files of {domain} are not there"
        return f"{where}: {fault}; {count}; {_advice(folder, first)}"

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
            file, _, columns = _source(self.data)
            for piece in pieces(file, dict(columns), (name,)):
                rows = piece.index[piece[name] == value]
                if len(rows):
                    return int(rows[0]) + FIRST_ROW
            return 0

        return first_row

    def unlisted(self, domain: str, part: str) -> str:
        """No row of the domain has the part."""
        file = table_file(self.data)
        column = self.data.column("split", "split")
        return f"{file}: no row of domain {domain!r} has {part!r} in the column {column!r}; name some"

    def _lists(self, domain: str) -> list[bytes]:
        return ["\0".join(self._parts(domain)).encode()]

    def _parts(self, domain: str) -> pd.Series:
        """The part of every row of a domain: train, validation, test, or an empty text, which is none of them."""
        file = table_file(self.data)
        column = self.data.column("split", "split")
        if facts(self.data).splits is None:
            raise UserError(
                f"{file} has no column {column!r}, which data.split = 'lists' and data.test_split = 'list' read"
            )
        texts = self._rows(domain)["split"]
        unknown = sorted(set(texts) - {"", *PARTS})
        if unknown:
            place = f"{unknown[0]!r} in the column {column!r} of domain {domain!r}"
            remedy = f"{nearest(unknown[0], PARTS)}leave the cell empty for an unused image"
            raise UserError(f"{file}: {place} is none of {', '.join(PARTS)}; {remedy}")
        return texts.map(PARTS).fillna("")

    def _rows(self, domain: str) -> pd.DataFrame:
        """Path, label (index of the class) and split of a domain's rows, sorted by label and path."""
        rows = _rows_of(*_source(self.data), domain)
        index_of = {name: index for index, name in enumerate(self.found.classes)}
        return rows.assign(label=rows["label"].map(index_of))


def table_file(data: DataSettings) -> Path:
    """The table: `data.root` itself."""
    file = data_root(data)
    if not file.exists():
        raise UserError(f"data.root: no file {file}{read_from(file)}; name the table's file")
    is_table = file.is_file() and file.suffix.lower() in SUFFIXES
    if not is_table:
        raise UserError(f"data.root: {file} is no table; name a file that ends in {', '.join(SUFFIXES)}")
    return file


def facts(data: DataSettings) -> Facts:
    """Facts of the settings' table, read once per process and version of the file."""
    return _facts(*_source(data))


def _source(data: DataSettings) -> tuple[Path, Version, Names]:
    """The table, the version of its file, and the names of its columns."""
    file = table_file(data)
    status = file.stat()
    version = (status.st_size, status.st_mtime_ns)
    names = sorted((name, data.column(name, name)) for name in data.columns)
    return file, version, tuple(names)


@functools.lru_cache(maxsize=8)
def _facts(file: Path, version: Version, columns: Names) -> Facts:
    counts: Counter[tuple[str, str]] = Counter()
    splits: Counter[str] | None = None
    _refuse_numbers(file, dict(columns))
    for piece in pieces(file, dict(columns), ("label", "domain", "split")):
        if "split" in piece:
            splits = (splits or Counter()) + Counter(piece["split"])
        groups = piece.groupby(["domain", "label"], sort=False, observed=True)
        counts.update(groups.size().to_dict())
    if not counts:
        raise UserError(f"{file} has no rows")
    if splits is None:
        return Facts(dict(counts), None)
    known_parts = {name: splits[name] for name in sorted(splits) if name in PARTS}
    return Facts(dict(counts), known_parts)


def _refuse_numbers(file: Path, columns: Mapping[str, str]) -> None:
    """UserError for a table without names of files, whose rows are examples by themselves."""
    _names_in_file(file, columns, ("label", "domain", "path"))
    first = next(pieces(file, columns, ("path",)), None)
    if first is None:
        return
    numbers = pd.to_numeric(first["path"], errors="coerce")
    if len(numbers) and numbers.notna().all():
        name = columns.get("path", "path")
        raise UserError(
            f"{file}: the column {name!r} holds numbers and no names of files; for a table of numbers set "
            "data.dataset = 'arrays'"
        )


@functools.lru_cache(maxsize=16)
def _rows_of(file: Path, version: Version, columns: Names, domain: str) -> pd.DataFrame:
    _refuse_doubles(file, version, columns)
    of_domain = []
    for piece in pieces(file, dict(columns), COLUMNS):
        is_here = piece["domain"] == domain
        of_domain.append(piece[is_here])
    rows = pd.concat(of_domain, ignore_index=True)
    return rows.sort_values(["label", "path"], ignore_index=True)


@functools.lru_cache(maxsize=8)
def _refuse_doubles(file: Path, version: Version, columns: Names) -> None:
    """UserError when two rows of any domains name one file, in one spelling or in two ('a/x.png' and './a/x.png').

    Such an image could train in one domain and be tested in the other. Only hashes of all paths are kept in memory.
    """
    hashes = np.concatenate([pd.util.hash_array(paths) for paths, _ in _files(file, columns)])
    in_order = np.sort(hashes)
    following = in_order[1:]
    repeated = following[following == in_order[:-1]]
    if not len(repeated):
        return
    seen: dict[str, int] = {}
    start = 0
    for paths, rows in _files(file, columns):
        end = start + len(paths)
        is_suspected = np.isin(hashes[start:end], repeated)
        for place in np.flatnonzero(is_suspected).tolist():
            path = paths[place]
            row = int(rows[place]) + FIRST_ROW
            first = seen.setdefault(path, row)
            if first != row:
                raise UserError(f"{file}: {path!r} has more than one row (rows {first} and {row}); keep one")
        start = end


def _files(file: Path, columns: Names) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Paths of a table as seen from its folder, each file in one spelling, and numbers of their rows, by pieces."""
    for piece in pieces(file, dict(columns), ("path",)):
        paths = piece["path"].to_numpy(dtype=object)
        is_odd = piece["path"].str.contains(ODD_PATH)
        for place in np.flatnonzero(is_odd):
            path = file.parent / paths[place]
            paths[place] = os.path.relpath(path, file.parent)
        yield paths, piece.index.to_numpy()


def pieces(file: Path, columns: Mapping[str, str], wanted: tuple[str, ...]) -> Iterator[pd.DataFrame]:
    """The wanted columns of a table under our names, as text, some rows at a time.

    A missing `split`, and a `group` that the settings do not name, are left out.
    """
    names = _names_in_file(file, columns, wanted)
    in_file = list(dict.fromkeys(names.values()))
    for raw in read_pieces(file, in_file):
        texts = {}
        for name, theirs in names.items():
            texts[name] = raw[theirs].astype(str).str.strip()
        piece = pd.DataFrame(texts)
        _refuse_empty(file, piece, raw, names)
        for name in ("label", "domain"):
            if name in piece:
                forms = {text: composed(text) for text in piece[name].unique()}
                piece[name] = piece[name].map(forms)
        if "split" in piece:
            is_missing = raw[names["split"]].isna()
            piece["split"] = piece["split"].str.lower().mask(is_missing, "")
        yield piece


def _names_in_file(file: Path, columns: Mapping[str, str], wanted: tuple[str, ...]) -> dict[str, str]:
    """{our name: the file's} of the wanted columns that the file has; UserError for a missing or repeated one."""
    for name in columns:
        if name not in COLUMNS:
            hint = f"{nearest(name, COLUMNS)}known: {', '.join(COLUMNS)}"
            raise UserError(f"data.columns: no column {name!r}; {hint}")
    present = header_of(file)
    names = {}
    for name in wanted:
        if name == "group" and name not in columns:
            continue
        theirs = columns.get(name, name)
        count = present.count(theirs)
        if count > 1:
            raise UserError(f"{file} has {count} columns {theirs!r}; remove or rename all but one")
        if count:
            names[name] = theirs
        elif name != "split" or name in columns:
            hint = f"{nearest(theirs, present)}it has: {', '.join(present)}"
            remedy = f"name it with data.columns.{name}{_other_form(file, name, present)}"
            raise UserError(f"{file} has no column {theirs!r}; {hint}; {remedy}")
    return names


def _other_form(file: Path, name: str, header: list[str]) -> str:
    """A hint at what a table may be that lacks our column `name`; empty for none."""
    if name == "path":
        return "; a table of numbers is data.dataset = 'arrays'"
    if name == "label":
        first = next(read_pieces(file, header), pd.DataFrame())
        return one_hot_hint(first)
    return ""


def _refuse_separator(file: Path, header: Sequence[str]) -> None:
    """UserError for a text with one column, whose name has another separator between what look like names."""
    if len(header) != 1:
        return
    [name] = header
    for sign in (";", "\t", "|", ","):
        if sign not in name:
            continue
        usual = "tabs" if file.suffix.lower() == ".tsv" else "commas"
        separator = "tabs" if sign == "\t" else repr(sign)
        raise UserError(
            f"{file}: its columns are separated by {separator} ({name!r}), and a {file.suffix} file has {usual}; "
            "save it with commas as .csv, or with tabs as .tsv"
        )


def _refuse_empty(file: Path, piece: pd.DataFrame, raw: pd.DataFrame, names: Mapping[str, str]) -> None:
    """UserError for an empty cell in a column that needs a value."""
    for name in piece.columns.difference(["split"]):
        theirs = names[name]
        is_empty = raw[theirs].isna() | (piece[name] == "")
        for row in raw.index[is_empty][:1]:
            raise UserError(f"{file}, row {row + FIRST_ROW}: the column {theirs!r} is empty")


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
    """The columns of a table, some rows at a time: cells of CSV as text, those of Parquet as they are.

    The index of a piece has the numbers of its rows in the file, from 0 on below the header.
    """
    with _refusals(file):
        if file.suffix.lower() == ".parquet":
            start = 0
            for batch in _parquet(file).iter_batches(PIECE, columns=columns):
                piece = batch.to_pandas()
                yield piece.set_axis(pd.RangeIndex(start, start + len(piece)))
                start += len(piece)
            return
        numbers = numbers_of_rows(file)
        # All columns are read, because pandas does not count a row's fields when it is asked for some of them.
        with _text(file, chunksize=PIECE) as reader:
            for piece in reader:
                is_numbered = isinstance(piece.index, pd.RangeIndex)
                if not is_numbered:  # pandas takes the first field as a name of the row
                    raise ValueError(f"row 2 has more fields than the header, which has {piece.shape[1]}")
                if numbers is not None:
                    piece.index = pd.Index(numbers[piece.index])
                yield piece


@contextmanager
def _refusals(file: Path) -> Iterator[None]:
    """Turns the errors of a table that cannot be read into a UserError."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, IndexError, csv.Error) as error:
        reason = first_line(error)
        raise UserError(
            f"cannot read the table {file} ({reason}); it must be UTF-8 text with a header, or Parquet"
        ) from None


def _text(file: Path, **options: Any) -> Any:
    separator = "\t" if file.suffix.lower() == ".tsv" else ","
    return pd.read_csv(file, sep=separator, encoding="utf-8-sig", dtype=str, keep_default_na=False, **options)


def _parquet(file: Path) -> Any:
    parquet = optional("pyarrow.parquet", "a Parquet table needs pyarrow", "parquet")
    return parquet.ParquetFile(file)


class Form(NamedTuple):
    """Another form of a path, and what was changed in it, in words."""

    path: str
    changes: tuple[str, ...] = ()

    def then(self, path: str, change: str) -> "Form":
        """The form after one more change; the same form where the change does nothing."""
        if path == self.path:
            return self
        return Form(path, (*self.changes, change))


def _advice(folder: Path, path: str) -> str:
    r"""What to do about a path that names no file seen from the table's folder, a clause.

    _advice(Path("data"), "photos\\a.png")  ->  "it is there as 'photos/a.png': write / for \\"
    """
    if ADDRESS.match(path):
        return "it is an address, and images are read from files: download them, and name the files"
    for form in _forms(folder, path):
        if form.changes and (folder / form.path).is_file():
            return f"it is there as {form.path!r}: {', '.join(form.changes)}"
    return "correct the path, which is read from the table's folder, or leave the row out"


def _forms(folder: Path, path: str) -> Iterator[Form]:
    """Forms in which a path might name a file, the likely ones first."""
    form = Form(path).then(path.replace("\\", "/"), "write / for \\")
    form = form.then(DRIVE.sub("", form.path), "leave out the drive")
    form = form.then(str(Path(form.path).expanduser()), "write the home folder for ~")
    decoded = form.then(unquote(form.path), "write signs for their % codes")
    for each in (form, decoded):
        for placed in _placed(folder, each):
            yield placed
            yield from _completed(folder, placed)


def _placed(folder: Path, form: Form) -> Iterator[Form]:
    """The form as it is, without its first folders, and as seen from other folders."""
    yield form
    parts = Path(form.path).parts
    for count in range(1, len(parts)):
        shorter = os.path.join(*parts[count:])  # noqa: PTH118  a text, as it stands in the table
        first = os.path.join(*parts[:count])  # noqa: PTH118
        yield form.then(shorter, f"leave out {first!r} at the beginning")
    above = folder.absolute().parents[:LEVELS_UP]
    below = sorted(each for each in folder.iterdir() if each.is_dir())
    for other in (start_folder(), *above, *below):
        seen = os.path.relpath(other / form.path, folder)
        yield form.then(seen, "it is read from the table's folder")


def _completed(folder: Path, form: Form) -> Iterator[Form]:
    """The form with the name of an image file in its folder, that has another ending or another case."""
    path = Path(form.path)
    place = (folder / path).parent
    if not place.is_dir():
        return
    name = path.name
    stem, _, _ = name.rpartition(".")
    present = sorted(each.name for each in place.iterdir() if is_image(each.name))
    for other in present:
        changed = str(path.with_name(other))
        other_stem, _, _ = other.rpartition(".")
        if other_stem == name:
            yield form.then(changed, "add the ending of the name")
        elif other.casefold() == name.casefold():
            yield form.then(changed, "write capital and small letters as the file has them")
        elif other_stem == stem:
            yield form.then(changed, "the file has another ending")
