"""Hugging Face data sets: image, label and domain columns, decoded once into the cache.

They are on disk (`save_to_disk`), or they are the partitions of a `FederatedDataset` (fedsim/data/hf_rows.py).
"""

import functools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedsim.common.about import optional
from fedsim.common.errors import UserError, nearest
from fedsim.common.files import atomic_write
from fedsim.data.cache import DIGEST_BYTES, digest, remove_leftovers, reserved
from fedsim.data.findings import Finding
from fedsim.data.hf_rows import Opened, join_partitions, saved_rows
from fedsim.data.label_findings import count_names, label_findings, name_findings
from fedsim.data.levels import split_domains
from fedsim.data.lists import PARTS, reads_lists
from fedsim.data.names import composed
from fedsim.data.pixel_findings import pixel_findings, tally_of
from fedsim.data.pixels import decode_measured, read_bytes, unreadable
from fedsim.data.reader import Images, Reader, content_hash, nameless_hash, numbers_of_groups
from fedsim.data.row import Benchmark
from fedsim.data.tables import named
from fedsim.settings import DataSettings, cache_root, data_root

OF_PARTITIONS = ""  # stands for the column of domains of partitions, which have none
COLUMNS = {"path": "image", "label": "label", "domain": "domain"}  # our name -> theirs, where data.columns says none
Version = tuple[int, int, int]
Shape = tuple[int, ...]
Cells = Iterable[tuple[Path, bytes | None]]  # name and bytes of each image; None where the name is that of its file


class Source(NamedTuple):
    """What is opened: a folder with the versions of its files, or the module:name of partitions.

    columns: those of images, labels and domains, as the data set calls them; partitions have no column of domains
    """

    where: Path | str
    versions: tuple[Version, ...]
    columns: tuple[str, ...]


class Stored(NamedTuple):
    """The decoded images of a domain, their own heights and widths [N,2], and the numbers of `tally_of`."""

    images: np.ndarray
    sizes: np.ndarray
    seen: dict[str, Any]


def discover(data: DataSettings, row: Benchmark) -> Benchmark:
    """The row with the data set's domains, and the sorted classes of the used ones; `data.classes` may add classes.

    A label column with names (ClassLabel) also keeps the classes without images. Raises UserError for a folder that is
    not such a data set, a missing column, and fewer than two classes.
    """
    _refuse_columns(data)
    opened = _opened(data)
    labels = opened.rows.features[_column(data, "label")]
    return named(
        row,
        data,
        pairs=_pairs(_source(data)),
        classes=getattr(labels, "names", None) or (),
        splits=opened.splits,
        where=_where(data),
    )


def _refuse_columns(data: DataSettings) -> None:
    """Raises UserError for a key of `data.columns` that is not read here, such as split: the splits have names."""
    if _is_partitioned(data) and "domain" in data.columns:
        raise UserError(
            f"data.columns.domain: the domains of {data.dataset!r} are its partitions, and no column; partition it by "
            "that column (NaturalIdPartitioner), or leave the setting out"
        )
    keys = (*COLUMNS, "group")
    for name in data.columns:
        if name not in keys:
            hint = f"{nearest(name, keys)}known: {', '.join(keys)}"
            raise UserError(f"data.columns: no column {name!r} is read of this data set; {hint}")


class HuggingFaceReader(Reader):
    """Reads the images of one domain in the data set's own order, of all splits that the data set has."""

    def labels(self, domain: str) -> np.ndarray:
        """Class indices of a domain's images."""
        index = {name: position for position, name in enumerate(self.found.classes)}
        texts = _texts(self.data, "label")
        labels = [index[texts[row]] for row in self._of(domain)]
        return np.array(labels, np.int64)

    def images(self, domain: str, apart: bool = False) -> Images:
        """Images, decoded on first use, and labels."""
        return self._decoded(domain).images, self.labels(domain)

    def sizes(self, domain: str) -> np.ndarray:
        """Heights and widths of the images."""
        return self._decoded(domain).sizes

    def _decoded(self, domain: str) -> Stored:
        """A domain's decoded images, their sizes and what was seen of them, from files of the cache.

        They are made anew when one is damaged.
        """
        size = self.data.image_size
        name = self._hash_of("5", domain, str(size))
        shape = (len(self._of(domain)), 3, size, size)
        file = self._cached(f"{name}.npy")
        return _decoded(file, shape, lambda: self._cells(domain))

    def _hash_of(self, kind: str, domain: str, *more: str) -> str:
        """The name of a file of the cache with something of this kind that is made of a domain's images."""
        texts = (kind, domain, self.fingerprint(domain), *more)
        return content_hash(*(text.encode() for text in texts))

    def fingerprint(self, domain: str) -> str:
        """Hash of the labels, of Arrow's own fingerprint of the data set's content, and of files that it only names.

        The columns of images and of domains are in it where they have other names than usual: a data set may have two.
        """
        parts = [
            _rows(self.data)._fingerprint.encode(),
            self.labels(domain).tobytes(),
        ]
        for name in ("path", "domain"):
            column = self.data.columns.get(name, COLUMNS[name])
            if column != COLUMNS[name]:
                parts.append(f"{name}={column}".encode())
        files = self._named_files(domain)
        if files:
            parts.append(self._digests(files))
        if reads_lists(self.data):
            parts.append("\0".join(self._parts(domain)).encode())
        groups = self.groups(domain)
        if groups is not None:
            parts.append(groups.tobytes())
        return content_hash(*parts)

    def findings(self) -> list[Finding]:
        """What the labels and the domains show; row numbers are not counted as in a text."""
        where = _where(self.data)
        labels = _texts(self.data, "label")
        domains = _texts(self.data, "domain")
        used = [label for label, domain in zip(labels, domains) if domain in self.found.domains]
        remedy = "name the column of the domains in data.columns.domain"
        return [
            *label_findings(count_names(used), where, _column(self.data, "label")),
            *name_findings(count_names(domains), where, _column(self.data, "domain")),
            *split_domains(self.found.domains, where, remedy),
        ]

    def file_findings(self) -> list[Finding]:
        """What the images of the used domains lose when they are decoded."""
        findings = []
        for domain in self.found.domains:
            findings += pixel_findings(domain, self._decoded(domain).seen)
        return findings

    def groups(self, domain: str) -> np.ndarray | None:
        """The numbers int64 [N] of the values of the column `data.columns.group`; None where it names none."""
        column = self.data.column("group", "")
        if not column:
            return super().groups(domain)
        columns = _rows(self.data).column_names
        if column not in columns:
            hint = nearest(column, columns)
            present = ", ".join(columns)
            raise UserError(
                f"{_where(self.data)} has no column {column!r} (data.columns.group); {hint}it has: {present}"
            )
        texts = _text_column(_source(self.data), column)
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
        counts = list(splits.values())
        of_rows = np.repeat(np.array(parts, dtype=object), counts)
        return of_rows[self._of(domain)]

    def _named_files(self, domain: str) -> list[Path]:
        """The image files of a domain that lie outside the data set, which only has their paths."""
        rows = _rows(self.data)
        column = _column(self.data, "path")
        kind = str(getattr(rows.features[column], "dtype", ""))
        if kind not in ("string", "large_string"):
            return []
        of_domain = rows.select(self._of(domain)).select_columns([column])
        return [Path(cell) for cell in of_domain[column] if cell]

    def digests(self, domain: str) -> np.ndarray:
        """Digests of the images' bytes. They are read once; the cache keeps them."""

        def read() -> list[bytes]:
            return [digest(content or read_bytes(file)) for file, content in self._cells(domain)]

        name = self._hash_of("images", domain)
        joined = self._cached_digests(name, len(self._of(domain)), read)
        return np.frombuffer(joined, np.uint8).reshape(-1, DIGEST_BYTES)

    def nameless(self, domain: str) -> str:
        """Hash of the labels and the images' bytes."""
        digests = [row.tobytes() for row in self.digests(domain)]
        return nameless_hash(self.labels(domain), digests)

    def _digests(self, files: Sequence[Path]) -> bytes:
        """The hashes of files, which are read once, and again when one has another size or time.

        They are in the cache, because a site may start a new process for every message.
        """

        def read() -> list[bytes]:
            return [digest(read_bytes(file)) for file in files]

        facts = []
        for file in files:
            fact = f"{file.absolute()}\0{_version(file)}"
            facts.append(fact.encode(errors="surrogateescape"))
        name = content_hash(b"files", *facts)
        return self._cached_digests(name, len(files), read)

    def _cached_digests(self, name: str, count: int, read: Callable[[], list[bytes]]) -> bytes:
        """`count` digests one after the other, from the cache where they are there, else read once."""
        file = self._cached(f"{name}.digests")
        return _content(file, DIGEST_BYTES * count, lambda: b"".join(read()))

    def _cached(self, name: str) -> Path:
        """A file of the cache."""
        return cache_root(self.data) / "huggingface" / name

    def _cells(self, domain: str) -> Iterator[tuple[Path, bytes | None]]:
        """Name and bytes of every image of a domain; None where the data set only names the file."""
        import datasets

        where = _where(self.data)
        column = _column(self.data, "path")
        places = self._of(domain)
        try:
            rows = _rows(self.data).select(places).select_columns([column])
            rows = rows.cast_column(column, datasets.Image(decode=False))
        except (NotImplementedError, TypeError, ValueError) as error:  # Arrow's errors are of these classes
            reason = str(error)[:100]
            raise UserError(
                f"{data_root(self.data)}: the column {column!r} does not hold images ({reason}); "
                "name the one that does with data.columns.path"
            ) from None
        for place, row in zip(places, rows, strict=True):
            cell = row[column] or {"path": None, "bytes": None}
            path, content = cell["path"], cell["bytes"]
            if not path and not content:
                raise _row_error(where, place, f"there is no image in the column {column!r}")
            name = path or f"{where}, row {place}"
            yield Path(name), content

    def _of(self, domain: str) -> np.ndarray:
        domains = np.array(_texts(self.data, "domain"), dtype=object)
        return np.flatnonzero(domains == domain)


def _column(data: DataSettings, name: str) -> str:
    return data.column(name, COLUMNS[name])


def _rows(data: DataSettings) -> Any:
    return _opened(data).rows


def _opened(data: DataSettings) -> Opened:
    return _open(_source(data))


def _where(data: DataSettings) -> Path | str:
    """The folder of the data set, or the name of its partitions."""
    return data.dataset if _is_partitioned(data) else data_root(data)


def _is_partitioned(data: DataSettings) -> bool:
    """Whether the data set is a `FederatedDataset`, whose partitions are the domains."""
    return ":" in data.dataset


def _source(data: DataSettings) -> Source:
    """The folder of a data set and the versions of the files that `save_to_disk` writes anew, or a name alone."""
    columns = tuple(_column(data, name) for name in COLUMNS)
    if _is_partitioned(data):
        return Source(data.dataset, (), (*columns[:-1], OF_PARTITIONS))
    folder = data_root(data).resolve()
    if not folder.is_dir():
        raise UserError(f"data.root: no folder {folder}; name what `save_to_disk` wrote")
    files = [*folder.glob("*.json"), *folder.glob("*/state.json")]
    versions = tuple(_version(file) for file in sorted(files))
    return Source(folder, versions, columns)


@functools.lru_cache(maxsize=4)
def _open(source: Source) -> Opened:
    where = source.where
    optional("datasets", "a Hugging Face data set needs the package datasets", "hf")
    opened = join_partitions(where) if isinstance(where, str) else saved_rows(where)
    columns = opened.rows.column_names
    for name, theirs in zip(COLUMNS, source.columns):
        is_partition = name == "domain" and opened.domains
        if theirs not in columns and not is_partition:
            hint = nearest(theirs, columns)
            present = ", ".join(columns)
            raise UserError(
                f"{where} has no column {theirs!r}; {hint}it has: {present}; name it with data.columns.{name}"
            )
    return opened


def _texts(data: DataSettings, name: str) -> tuple[str, ...]:
    """A column of names as text, in the order of the rows."""
    source = _source(data)
    column = source.columns[list(COLUMNS).index(name)]
    return _text_column(source, column)


@functools.lru_cache(maxsize=8)
def _text_column(source: Source, column: str) -> tuple[str, ...]:
    rows, _, domains = _open(source)
    if column == OF_PARTITIONS:
        return domains
    names = getattr(rows.features[column], "names", None)
    values = _values(rows, column)
    texts: dict[Any, str] = {}  # of every value, because a large data set has few different ones
    for row, value in enumerate(values):
        if isinstance(value, (list, dict)):
            raise _row_error(source.where, row, f"the column {column!r} holds several values")
        if value in texts:
            continue
        is_empty = value is None or value != value or value == ""  # a NaN does not equal itself
        if is_empty:
            raise _row_error(source.where, row, f"the column {column!r} is empty")
        if names and not 0 <= value < len(names):
            fault = f"{value} in the column {column!r} is none of the {len(names)} named classes"
            raise _row_error(source.where, row, fault)
        name = names[value] if names else str(value)
        texts[value] = composed(name)
    return tuple(texts[value] for value in values)


def _values(rows: Any, column: str) -> list:
    """The values of a column; Arrow's own conversion is faster, and knows nothing of rows that were chosen."""
    if rows._indices is None:
        return rows.data.column(column).to_pylist()
    return rows[column]


@functools.lru_cache(maxsize=4)
def _pairs(source: Source) -> set[tuple[str, str]]:
    """Every (domain, label) that occurs."""
    _, label, domain = source.columns
    labels = _text_column(source, label)
    domains = _text_column(source, domain)
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


# ---------------------------------------------------------------------------------------------- the files of the cache


def _decoded(file: Path, shape: Shape, cells: Callable[[], Cells]) -> Stored:
    """Images uint8 [N,3,s,s] of `shape` in the file, and what the files next to it hold of them.

    They are decoded from `cells` when a file is not there or is damaged. Raises UserError when they cannot be written.
    """
    stored = _stored(file, shape)
    if stored is None:
        _decode(file, shape, cells())
        stored = _stored(file, shape)
    if stored is None:
        raise UserError(f"the image cache {file} cannot be read back; delete it or set data.cache")
    return stored


def _content(file: Path, size: int, make: Callable[[], bytes]) -> bytes:
    """The content of a file, which is made when the file is not there or has another size."""
    if file.is_file() and file.stat().st_size == size:
        return file.read_bytes()
    content = make()
    try:
        atomic_write(file, content)
    except OSError as error:
        raise _unwritable(file, error) from None
    return content


def _sizes(file: Path) -> Path:
    return file.with_suffix(".sizes.npy")


def _seen(file: Path) -> Path:
    return file.with_suffix(".seen.json")


def _stored(file: Path, shape: Shape) -> Stored | None:
    """The images, their sizes and what was seen of them; None when there are none or they are damaged."""
    try:
        images = np.load(file, mmap_mode="r", allow_pickle=False)
        sizes = np.load(_sizes(file), allow_pickle=False)
        seen = json.loads(_seen(file).read_text())
    except (OSError, ValueError, EOFError):
        return None
    has_sizes = sizes.shape == (shape[0], 2)
    if images.shape != shape or not has_sizes:
        return None
    return Stored(images, sizes, seen)


def _decode(file: Path, shape: Shape, cells: Cells) -> None:
    """Writes all files in a temporary folder, then moves them, the images last."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(file.parent)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=".tmp-") as folder:
            _write(Path(folder, file.name), shape, cells)
            for path in (_sizes(file), _seen(file), file):
                Path(folder, path.name).replace(path)
    except OSError as error:
        raise _unwritable(file, error) from None


def _write(file: Path, shape: Shape, cells: Cells) -> None:
    """Decodes the images into a file; their sizes, and what is seen of them, into those next to it."""
    images = reserved(file, shape)
    sizes = np.empty((shape[0], 2), np.int32)
    measured = []
    for index, (name, content) in enumerate(cells):
        image, size, measures = decode_measured(name, shape[-1], content)
        images[index] = image
        sizes[index] = size
        measured.append(measures)
    images.flush()
    np.save(_sizes(file), sizes, allow_pickle=False)
    _seen(file).write_text(json.dumps(tally_of(measured)))


def _unwritable(file: Path, error: OSError) -> UserError:
    return UserError(f"cannot write the image cache {file} ({error.strerror}); set data.cache")
