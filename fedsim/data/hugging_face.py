"""Hugging Face data sets: image, label and domain columns, decoded once into the cache.

They are on disk (`save_to_disk`), or they are the partitions of a `FederatedDataset` (fedsim/data/hf_rows.py).
"""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.common.about import optional
from fedsim.common.errors import UserError, nearest
from fedsim.data.cache import DIGEST_BYTES, digest
from fedsim.data.cached_files import Kept, content, decoded
from fedsim.data.findings import Finding
from fedsim.data.hf_rows import Opened, join_partitions, saved_rows
from fedsim.data.label_findings import count_names, label_findings, name_findings
from fedsim.data.levels import split_domains
from fedsim.data.lists import PARTS, reads_lists
from fedsim.data.names import composed
from fedsim.data.pixel_findings import pixel_findings
from fedsim.data.pixels import read_bytes, unreadable
from fedsim.data.reader import Images, Reader, content_hash, nameless_hash, numbers_of_groups
from fedsim.data.row import Benchmark
from fedsim.data.tables import named
from fedsim.settings import DataSettings, cache_root, data_root

COLUMNS = {"path": "image", "label": "label", "domain": "domain"}  # our name -> theirs, where data.columns says none
Version = tuple[int, int, int]
Saved = tuple[Path | str, tuple[Version, ...]]  # a folder and its files, or the module:name of partitions


def discover(data: DataSettings, row: Benchmark) -> Benchmark:
    """The row with the data set's domains, and the sorted classes of the used ones; `data.classes` may add classes.

    A label column with names (ClassLabel) also keeps the classes without images. Raises UserError for a folder that is
    not such a data set, a missing column, and fewer than two classes.
    """
    opened = _opened(data)
    classes = getattr(opened.rows.features[_column(data, "label")], "names", None) or ()
    return named(row, data, _pairs(*_source(data)), classes, opened.splits, _where(data))


class HuggingFaceReader(Reader):
    """Reads the images of one domain in the data set's own order, of all splits that the data set has."""

    def labels(self, domain: str) -> np.ndarray:
        """Class indices of a domain's images."""
        index = {name: position for position, name in enumerate(self.found.classes)}
        texts = _texts(self.data, "label")
        return np.array([index[texts[row]] for row in self._of(domain)], np.int64)

    def images(self, domain: str, apart: bool = False) -> Images:
        """Images, decoded on first use, and labels."""
        return self._decoded(domain)[0], self.labels(domain)

    def sizes(self, domain: str) -> np.ndarray:
        """Heights and widths of the images."""
        return self._decoded(domain)[1]

    def _decoded(self, domain: str) -> Kept:
        """A domain's decoded images, their sizes and what was seen of them, from files of the cache.

        They are made anew when one is damaged.
        """
        size = self.data.image_size
        name = content_hash(b"4", domain.encode(), self.fingerprint(domain).encode(), str(size).encode())
        shape = (len(self._of(domain)), 3, size, size)
        return decoded(self._kept_in(f"{name}.npy"), shape, lambda: self._cells(domain))

    def fingerprint(self, domain: str) -> str:
        """Hash of the labels, of Arrow's own fingerprint of the data set's content, and of files that it only names."""
        named = self._digests(self._named_files(domain))
        parts = [_rows(self.data)._fingerprint.encode(), self.labels(domain).tobytes()]
        splits = ["\0".join(self._parts(domain)).encode()] if reads_lists(self.data) else []
        groups = self.groups(domain)
        more = [] if groups is None else [groups.tobytes()]
        return content_hash(*parts, *([named] if named else []), *splits, *more)

    def findings(self) -> list[Finding]:
        """What the labels and the domains show; row numbers are not counted as in a text."""
        texts, where = list(zip(_texts(self.data, "domain"), _texts(self.data, "label"))), _where(self.data)
        labels = count_names([label for domain, label in texts if domain in self.found.domains])
        domains = count_names([domain for domain, _ in texts])
        remedy = "name the column of the domains in data.columns.domain"
        return [
            *label_findings(labels, where, _column(self.data, "label")),
            *name_findings(domains, where, _column(self.data, "domain")),
            *split_domains(self.found.domains, where, remedy),
        ]

    def file_findings(self) -> list[Finding]:
        """What the images of the used domains lose when they are decoded."""
        findings = []
        for domain in self.found.domains:
            findings += pixel_findings(domain, self._decoded(domain)[2])
        return findings

    def groups(self, domain: str) -> np.ndarray | None:
        """The numbers int64 [N] of the values of the column `data.columns.group`; None where it names none."""
        column = self.data.column("group", "")
        if not column:
            return super().groups(domain)
        columns = _rows(self.data).column_names
        if column not in columns:
            raise UserError(
                f"{_where(self.data)} has no column {column!r} (data.columns.group); "
                f"{nearest(column, columns)}it has: {', '.join(columns)}"
            )
        texts = _text_column(*_source(self.data), column)
        return numbers_of_groups(texts[row] for row in self._of(domain))

    def listed(self, domain: str, part: str) -> np.ndarray | None:
        """Indices of the images of a domain that are in the data set's own split `part`; None when there is none."""
        chosen = np.flatnonzero(self._parts(domain) == part)
        return chosen if len(chosen) else None

    def unlisted(self, domain: str, part: str) -> str:
        """The domain has no image in a split of that name."""
        names = ", ".join(_opened(self.data).splits)
        return f"{_where(self.data)}: domain {domain!r} has no image in a split named {part!r}; its splits are {names}"

    def _parts(self, domain: str) -> np.ndarray:
        """What the split of each of a domain's rows is for; an empty text for one of another name, which is not used.

        Raises UserError for a data set without splits.
        """
        splits = _opened(self.data).splits
        if not splits:
            raise UserError(
                f"{_where(self.data)} is one Dataset without splits, which data.split = 'lists' and "
                "data.test_split = 'list' read; save a DatasetDict"
            )
        parts = [PARTS.get(name.lower(), "") for name in splits]
        return np.repeat(np.array(parts, dtype=object), list(splits.values()))[self._of(domain)]

    def _named_files(self, domain: str) -> list[Path]:
        """The image files of a domain that lie outside the data set, which only has their paths."""
        rows, column = _rows(self.data), _column(self.data, "path")
        if str(getattr(rows.features[column], "dtype", "")) not in ("string", "large_string"):
            return []
        cells = rows.select(self._of(domain)).select_columns([column])[column]
        return [Path(cell) for cell in cells if cell]

    def digests(self, domain: str) -> np.ndarray:
        """Digests of the images' bytes. They are read once; the cache keeps them."""
        name = content_hash(b"images", domain.encode(), self.fingerprint(domain).encode())
        joined = content(
            self._kept_in(f"{name}.digests"),
            DIGEST_BYTES * len(self._of(domain)),
            lambda: b"".join(digest(whole or read_bytes(file)) for file, whole in self._cells(domain)),
        )
        return np.frombuffer(joined, np.uint8).reshape(-1, DIGEST_BYTES)

    def nameless(self, domain: str) -> str:
        """Hash of the labels and the images' bytes."""
        return nameless_hash(self.labels(domain), [row.tobytes() for row in self.digests(domain)])

    def _digests(self, files: Sequence[Path]) -> bytes:
        """The hashes of files, which are read once, and again when one has another size or time: a site may start a
        new process for every message."""
        if not files:
            return b""
        facts = [f"{file.absolute()}\0{_version(file)}".encode(errors="surrogateescape") for file in files]
        stored = self._kept_in(f"{content_hash(b'files', *facts)}.digests")
        return content(stored, DIGEST_BYTES * len(files), lambda: b"".join(digest(read_bytes(file)) for file in files))

    def _kept_in(self, name: str) -> Path:
        """A file of the cache."""
        return cache_root(self.data) / "huggingface" / name

    def _cells(self, domain: str) -> Iterator[tuple[Path, bytes | None]]:
        """Name and bytes of every image of a domain; None where the data set only names the file."""
        import datasets

        column, places = _column(self.data, "path"), self._of(domain)
        try:
            rows = _rows(self.data).select(places).select_columns([column])
            rows = rows.cast_column(column, datasets.Image(decode=False))
        except (NotImplementedError, TypeError, ValueError) as error:  # Arrow's errors are of these classes
            raise UserError(f"{data_root(self.data)}: the column {column!r} does not hold images ({str(error)[:100]}); "
                            "name the one that does with data.columns.path") from None  # fmt: skip
        for place, row in zip(places, rows, strict=True):
            cell = row[column] or {"path": None, "bytes": None}
            if not cell["path"] and not cell["bytes"]:
                raise _row_error(_where(self.data), place, f"there is no image in the column {column!r}")
            yield Path(cell["path"] or f"{_where(self.data)}, row {place}"), cell["bytes"]

    def _of(self, domain: str) -> np.ndarray:
        return np.flatnonzero(np.array(_texts(self.data, "domain"), dtype=object) == domain)


def _column(data: DataSettings, name: str) -> str:
    return data.column(name, COLUMNS[name])


def _rows(data: DataSettings) -> Any:
    return _opened(data).rows


def _opened(data: DataSettings) -> Opened:
    return _open(*_source(data))


def _source(data: DataSettings) -> tuple[Saved, tuple[str, ...]]:
    """What is opened, and its columns of images, labels and domains."""
    return _saved(data), tuple(_column(data, name) for name in COLUMNS)


def _where(data: DataSettings) -> Path | str:
    """The folder of the data set, or the name of its partitions."""
    return data.dataset if ":" in data.dataset else data_root(data)


def _saved(data: DataSettings) -> Saved:
    """The folder of a data set and the versions of the files that `save_to_disk` writes anew, or a name alone."""
    if ":" in data.dataset:
        return data.dataset, ()
    folder = data_root(data).resolve()
    if not folder.is_dir():
        raise UserError(f"data.root: no folder {folder}; name what `save_to_disk` wrote")
    files = sorted(file for name in ("*.json", "*/state.json") for file in folder.glob(name))
    return folder, tuple(_version(file) for file in files)


@functools.lru_cache(maxsize=4)
def _open(saved: Saved, wanted: tuple[str, ...]) -> Opened:
    where, _ = saved
    optional("datasets", "a Hugging Face data set needs the package datasets", "hf")
    opened = join_partitions(where) if isinstance(where, str) else saved_rows(where)
    columns = opened.rows.column_names
    for name, theirs in zip(COLUMNS, wanted):
        if theirs not in columns and not (name == "domain" and opened.domains):
            raise UserError(
                f"{where} has no column {theirs!r}; {nearest(theirs, columns)}it has: {', '.join(columns)}; "
                f"name it with data.columns.{name}"
            )
    return opened


def _texts(data: DataSettings, name: str) -> tuple[str, ...]:
    """A column of names as text, in the order of the rows."""
    return _text_column(*_source(data), _column(data, name))


@functools.lru_cache(maxsize=8)
def _text_column(saved: Saved, wanted: tuple[str, ...], column: str) -> tuple[str, ...]:
    folder, (rows, _, domains) = saved[0], _open(saved, wanted)
    if domains and column == wanted[-1]:
        return domains
    names = getattr(rows.features[column], "names", None)
    values = rows.data.column(column).to_pylist() if rows._indices is None else rows[column]
    texts: dict[Any, str] = {}  # of every value, because a large data set has few different ones
    for row, value in enumerate(values):
        if value is None or value != value or value == "":  # a NaN does not equal itself
            raise _row_error(folder, row, f"the column {column!r} is empty")
        if names and not 0 <= value < len(names):
            raise _row_error(folder, row, f"{value} in the column {column!r} is none of the {len(names)} named classes")
        if isinstance(value, (list, dict)):
            raise _row_error(folder, row, f"the column {column!r} holds several values")
        if value not in texts:
            texts[value] = composed(names[value] if names else str(value))
    return tuple(texts[value] for value in values)


@functools.lru_cache(maxsize=4)
def _pairs(saved: Saved, wanted: tuple[str, ...]) -> set[tuple[str, str]]:
    """Every (domain, label) that occurs."""
    labels, domains = (_text_column(saved, wanted, wanted[number]) for number in (1, 2))
    return set(zip(domains, labels))


def _row_error(folder: Path | str, row: int, reason: str) -> UserError:
    """The error for a row, counted from 0 as in the data set, of which all splits are joined."""
    return UserError(f"{folder}, row {row}: {reason}; correct or remove the row")


def _version(file: Path) -> Version:
    """What changes when a file's content does."""
    try:
        status = file.stat()
    except OSError as error:
        raise unreadable(file, error) from None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns
