"""Reads tensors that are no images: an .npz file, tables of numbers, or torch Datasets by domain.

    data.dataset = "arrays"        data.root is a file with the column `domain`, or a folder with a file for each domain
    data.dataset = "module:name"   a mapping from domains to map-style Datasets of (tensor, target), or a function that
                                   is declared to return one
    data.dataset = "hospitals"     the table that comes with fedsim

An .npz file has x [N, ...], label [N], domain [N] and perhaps split [N], and an array of groups [N] where
`data.columns.group` names one. Values become float32 and are not divided.

With data.task = "regression" a label is a number, and with "multi-label" it is several columns of 0 and 1 (`label =
["a", "b"]`), or an array [N, L]. Such labels are the targets of the examples, which then have no classes.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.common.errors import UserError, first_line, nearest
from fedsim.common.tasks import OF_TENSORS, TASKS
from fedsim.data.array_rows import EMBEDDED, PARTITIONED
from fedsim.data.feature_tables import (
    LISTS,
    Columns,
    category_findings,
    class_order,
    columns_of,
    complete_rows,
    encode,
    left_out_columns,
    names_of_labels,
    read_rows,
    read_table,
    refuse_empty,
    targets_of,
    text_of_names,
    with_categories,
    with_features,
)
from fedsim.data.findings import Finding
from fedsim.data.label_findings import class_findings, count_names, label_findings, one_hot_hint
from fedsim.data.lists import PARTS, reads_lists
from fedsim.data.names import composed, read_from, refuse_alike, used_of
from fedsim.data.reader import Images, Reader, content_hash, nameless_hash, numbers_of_groups
from fedsim.data.row import Benchmark
from fedsim.data.targets import checked_targets, declared_outputs, names_of_targets, targets_or_classes
from fedsim.data.tensor_sets import check_labels, name_classes, read_tensors
from fedsim.data.text_table import FIRST_ROW, Cells, TextTable, read_shipped
from fedsim.data.text_table import SUFFIXES as TABLES
from fedsim.settings import DataSettings, data_root
from fedsim.settings.plugins import called, load

SUFFIXES = (*TABLES, ".npz")
ARRAYS = ("label", "domain", "split", "group")  # of an .npz file, next to x
OF_NPZ = ("domain", "split", "group")  # keys of data.columns that a run's .npz files have where they are given
KEPT = 4  # opened data sets that a process keeps in memory
Form = tuple[tuple[int, ...], tuple[str, ...], int]  # of an example: shape, features, and numbers among them
Piece = tuple[Path, TextTable]  # a file, and some of its rows
Pieces = Mapping[str, Sequence[Piece]]  # {domain: its rows}


@dataclass(frozen=True, eq=False)
class Examples:
    """The examples of one domain: values float32 [N, ...], and names of classes [N] or targets float32 [N, Q].

    There may also be parts of a split [N] and names of groups [N].
    """

    values: np.ndarray
    labels: np.ndarray
    parts: np.ndarray | None = None
    groups: np.ndarray | None = None

    @property
    def has_targets(self) -> bool:
        """Whether the labels are targets, and no names of classes."""
        return self.labels.ndim == 2

    @cached_property
    def digests(self) -> np.ndarray:
        """Digests uint8 [N,10] of the values of each example, computed once for all runs of a process."""
        hashes = [content_hash(values.tobytes()) for values in self.values]
        digests = np.frombuffer(bytes.fromhex("".join(hashes)), np.uint8)
        return digests.reshape(len(hashes), -1)

    def chosen(self, indices: np.ndarray) -> "Examples":
        """Some of the examples."""
        examples = Examples(self.values[indices], self.labels[indices])
        if self.parts is not None:
            examples = replace(examples, parts=self.parts[indices])
        if self.groups is not None:
            examples = replace(examples, groups=self.groups[indices])
        return examples


Labelled = dict[str, tuple[Examples, list[str]]]  # {domain: (examples, what each is called)}


@dataclass(frozen=True, eq=False)
class Opened:
    """All domains that are here, their classes, and what the first axis of an example is made of.

    classes: those of the labels, or the names of the targets
    features: names of the columns of a table; () for other tensors
    numeric: the number of leading features, or of channels, that are numbers and can be standardized
    source: the mapping or function of a user's module, which is kept so that no later one has its identity
    findings: what the features of tables show
    """

    domains: Mapping[str, Examples]
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    features: tuple[str, ...]
    numeric: int
    source: object = None
    findings: Sequence[Finding] = ()


def discover(data: DataSettings, row: Benchmark) -> Benchmark:
    """The row with the domains, classes and shape of the examples.

    Where no file is here, because the data are on other machines, the settings must name them: data.domains,
    data.classes, and data.shape or the features with all their categories.
    """
    domains = set(map(composed, data.domains))
    outputs = declared_outputs(data)
    if not outputs:
        classes = map(composed, data.classes)
        outputs = tuple(sorted(classes, key=class_order))
    is_declared = bool(domains and outputs)
    if is_declared and _is_elsewhere(data, row):
        opened = Opened({}, outputs, *_declared_form(data))
    else:
        opened = open_arrays(data, row)
    if data.shape and tuple(data.shape) != opened.shape:
        raise UserError(
            f"data.shape = {data.shape}: the examples here have the shape {list(opened.shape)}; leave it out where "
            "files are here, or correct it"
        )
    return replace(
        row,
        domains=tuple(sorted(domains.union(opened.domains))),
        **targets_or_classes(data, opened.classes),
        shape=opened.shape,
        features=opened.features,
        numeric=opened.numeric,
    )


def _is_elsewhere(data: DataSettings, row: Benchmark) -> bool:
    """Whether the examples are in files, and no file is here."""
    if row.name in (PARTITIONED, *EMBEDDED):
        return False
    return not data_root(data).exists()


def _declared_form(data: DataSettings) -> Form:
    """The form of an example that the settings name, for a server without data."""
    if data.shape:
        return tuple(data.shape), (), data.shape[0]
    columns = columns_of(data, {})
    has_values = all(columns.categories.values())
    if not columns.features or not has_values:
        raise UserError(
            f"data.root: nothing at {data_root(data)}; a server without data needs data.shape, or "
            "data.columns.features and all values in data.columns.categories"
        )
    return _form_of_rows(columns, data.missing)


def _form_of_rows(columns: Columns, missing: str) -> Form:
    features = columns.names_of_inputs(missing)
    return (len(features),), features, len(columns.numbers)


class ArrayReader(Reader):
    """Reads tensors that are no images. All domains are read at once, and kept in memory."""

    own_files = True

    def find(self) -> None:
        """The files must be there, and readable."""
        open_arrays(self.data, self.found)

    def findings(self) -> list[Finding]:
        """What the names of classes in the used domains show; nothing where targets are no classes."""
        if not TASKS[self.found.task].has_classes:
            return []
        counts = {}
        together: Counter[str] = Counter()
        for domain in self.found.domains:
            labels = self._examples(domain).labels
            counts[domain] = count_names(labels.tolist())
            together.update(counts[domain])
        place = self.found.title
        if self.found.name == "arrays":
            place = str(data_root(self.data))
        column = self.data.column("label", "label")
        of_labels = label_findings(together, place, column)
        of_classes = class_findings(counts, f"{place}, column {column!r}")
        return of_labels + of_classes

    def value_findings(self) -> list[Finding]:
        """What the features of tables show."""
        return list(open_arrays(self.data, self.found).findings)

    def images(self, domain: str, apart: bool = False) -> Images:
        """Values float32 [N, ...] and labels int64 [N] of a domain."""
        examples = self._examples(domain)
        return examples.values, self.labels(domain)

    def labels(self, domain: str) -> np.ndarray:
        """The index of every example's class, int64 [N]."""
        examples = self._examples(domain)
        if examples.has_targets:  # all are of one stratum
            return np.zeros(len(examples.labels), np.int64)
        place = {name: index for index, name in enumerate(self.found.classes)}
        numbers = [place[name] for name in examples.labels.tolist()]
        return np.array(numbers, np.int64)

    def masks(self, domain: str, apart: bool = False) -> np.ndarray | None:
        """Targets float32 [N, Q]; None where the examples have classes."""
        examples = self._examples(domain)
        return examples.labels if examples.has_targets else None

    def listed(self, domain: str, part: str) -> np.ndarray | None:
        """Indices of the examples whose split is `part`; None when none of the domain has it."""
        parts = self._examples(domain).parts
        if parts is None:
            raise UserError(
                f"{self.found.title}: there is no split, which data.split = 'lists' and data.test_split = "
                "'list' read; add a column split, or an array of this name"
            )
        indices = np.flatnonzero(parts == part)
        return indices if len(indices) else None

    def unlisted(self, domain: str, part: str) -> str:
        """No example of the domain has the part."""
        return f"{self.found.title}: no example of domain {domain!r} has {part!r} as its split; name some"

    def groups(self, domain: str) -> np.ndarray | None:
        """The numbers int64 [N] of the values that `data.columns.group` names; None where it names none."""
        if "group" not in self.data.columns:
            return super().groups(domain)
        groups = self._examples(domain).groups
        if groups is None:
            raise UserError(f"{self.found.title} have no columns that data.columns.group could name; leave it out")
        return numbers_of_groups(groups)

    def fingerprint(self, domain: str) -> str:
        """Hash of the values and labels of a domain."""
        examples = self._examples(domain)
        values = examples.values
        shape = str(values.shape)
        content = [shape.encode(), values.tobytes()]
        if examples.has_targets:
            content.append(examples.labels.tobytes())
        else:
            content.append("\0".join(examples.labels).encode())
        if examples.parts is not None and reads_lists(self.data):
            content.append("\0".join(examples.parts).encode())
        groups = self.groups(domain)
        if groups is not None:
            content.append(groups.tobytes())
        return content_hash(*content)

    def digests(self, domain: str) -> np.ndarray:
        """Digests uint8 [N,10] of the values of each example, which find one that is in two domains."""
        return self._examples(domain).digests

    def nameless(self, domain: str) -> str:
        """Hash of the examples with their labels, in any order."""
        digests = [row.tobytes() for row in self.digests(domain)]
        labels = self.labels(domain)
        targets = self.masks(domain)
        if targets is not None:
            pairs = zip(digests, targets, strict=True)
            digests = [digest + target.tobytes() for digest, target in pairs]
        return nameless_hash(labels, digests)

    def _examples(self, domain: str) -> Examples:
        domains = open_arrays(self.data, self.found).domains
        if domain not in domains:
            hint = f"{nearest(domain, domains)}found: {', '.join(domains)}"
            raise UserError(f"{self.found.title}: no example of domain {domain!r} is here; {hint}")
        return domains[domain]


_opened: dict[tuple[Any, ...], Opened] = {}  # by what it was read from


def open_arrays(data: DataSettings, row: Benchmark) -> Opened:
    """All domains that are here, read once for each version of the files and each unseen domain.

    Raises UserError for files that are missing or cannot be read, and for values, labels and domains that do not fit.
    """
    source: object = None
    files: list[Path] = []
    if row.name == PARTITIONED:
        source = load(data.dataset, "data.dataset")
    else:
        files = array_files(data, row)
    settings = data.model_dump(include={"dataset", "task", "domains", "classes", "columns", "missing"})
    key = (
        row.name,
        id(source),
        tuple(_version(file) for file in files),
        json.dumps(settings),
        _held_out(data),
    )
    if key not in _opened:
        while len(_opened) >= KEPT:
            oldest = next(iter(_opened))
            del _opened[oldest]
        opened = _open(data, row, files, source)
        _opened[key] = replace(opened, source=source)
    return _opened[key]


def _held_out(data: DataSettings) -> tuple[str, ...]:
    """The domains whose rows say nothing about how examples are encoded, where that depends on rows at all.

    Only a column of categories without values depends on rows: it has the values of the sources. Without one, the runs
    of a sweep share what was read, whatever domain they leave out.
    """
    categories = columns_of(data, {}).categories
    if all(categories.values()):
        return ()
    return data.unseen_domain, data.validation_domain


def _version(file: Path) -> tuple[str, int, int]:
    """What changes when a file is written anew."""
    status = file.stat()
    return str(file), status.st_size, status.st_mtime_ns


def array_files(data: DataSettings, row: Benchmark) -> list[Path]:
    """The file that `data.root` names, or all files of the folder, sorted; the embedded one of a data set that has it.

    Raises UserError where there is none, and for files of both kinds.
    """
    if row.name in EMBEDDED:
        return [EMBEDDED[row.name].file]
    root = data_root(data)
    endings = ", ".join(SUFFIXES)
    if not root.exists():
        place = f"{root}{read_from(root)}"
        raise UserError(f"data.root: nothing at {place}; name a file ({endings}) or a folder of them")
    candidates = sorted(root.iterdir()) if root.is_dir() else [root]
    files = [file for file in candidates if file.suffix.lower() in SUFFIXES]
    if not files:
        raise UserError(f"data.root: {root} holds no file that ends in {endings}")
    kinds = {_is_npz(file) for file in files}
    if len(kinds) > 1:
        raise UserError(f"data.root: {root} holds .npz files and tables; keep one kind")
    return files


def _is_npz(file: Path) -> bool:
    return file.suffix.lower() == ".npz"


def _open(data: DataSettings, row: Benchmark, files: Sequence[Path], source: object) -> Opened:
    if row.name == PARTITIONED or _is_npz(files[0]):
        _refuse_lists(data)
    if row.name == PARTITIONED:
        return _open_datasets(data, source)
    if _is_npz(files[0]):
        return _open_npz(data, files)
    if row.name in EMBEDDED:
        shipped = EMBEDDED[row.name]
        table = read_shipped(shipped.file)
        return _open_tables(data, {shipped.file: table}, shipped.columns)
    tables = {file: read_table(file) for file in files}
    return _open_tables(data, tables, {})


def _refuse_lists(data: DataSettings) -> None:
    """Raises UserError for settings of a table's columns and cells, where the examples are no rows of a table."""
    of_tables = [f"columns.{name}" for name in LISTS if data.columns.get(name)]
    if data.missing != "mean":
        of_tables.append("missing")
    for name in of_tables:
        raise UserError(f"data.{name} is for tables, and these examples have no columns; leave it out")


def _open_datasets(data: DataSettings, source: object) -> Opened:
    """The Datasets to which `module:name` maps domains."""
    examples = {}
    for name, dataset in _mapping_of(data, source).items():
        domain = composed(str(name))
        tensors = read_tensors(dataset, domain, data.task)
        examples[domain] = Examples(tensors.values, tensors.labels)
    labels = {domain: of_domain.labels for domain, of_domain in examples.items()}
    if data.task in OF_TENSORS:
        targets = names_of_targets(data, labels, data.dataset)
        return _checked(examples, targets, data.dataset)
    classes, first = _numbered_classes(data, labels)
    names = np.array(classes, dtype=object)
    named = {}
    for domain, numbers in labels.items():
        named[domain] = replace(examples[domain], labels=names[numbers - first])
    return _checked(named, classes, data.dataset)


def _mapping_of(data: DataSettings, source: object) -> Mapping[Any, Any]:
    """The mapping from domains to Datasets that a user's module has, or that its function returns."""
    place = f"data.dataset {data.dataset!r}"
    mapping = source if isinstance(source, Mapping) else called(source, place)
    if not isinstance(mapping, Mapping) or not mapping:
        kind = type(mapping).__name__
        raise UserError(f"{place} is {kind}; give a mapping from domains to torch Datasets of (tensor, target)")
    return mapping


def _numbered_classes(data: DataSettings, labels: Mapping[str, np.ndarray]) -> tuple[tuple[str, ...], int]:
    """(names of the classes, number of the first one), of the settings or of what the domains have together.

    labels: numbers int64 [N] of each domain. Raises UserError for numbers that do not fit.
    """
    classes = tuple(data.classes)
    if not classes:
        classes = name_classes(labels)
        return classes, int(classes[0])
    for domain, numbers in labels.items():
        check_labels(numbers, len(classes), domain)
    return classes, 0


def _open_npz(data: DataSettings, files: Sequence[Path]) -> Opened:
    """The arrays of one .npz file, or of one for each domain."""
    domains: dict[str, Examples] = {}
    for file in files:
        for domain, examples in _read_npz(file, data).items():
            if domain in domains:
                raise UserError(f"{file}: the domain {domain!r} is in another file, too; keep one")
            domains[domain] = examples
    where = files[0].parent
    if data.task in OF_TENSORS:
        targets = {domain: examples.labels for domain, examples in domains.items()}
        names = names_of_targets(data, targets, where)
    else:
        names = _class_names(data, domains, where)
    return _checked(domains, names, where)


def _read_npz(file: Path, data: DataSettings, needed: Sequence[str] = OF_NPZ) -> dict[str, Examples]:
    """The examples of a file's domains; without `domain` there is one, called like the file.

    needed: the keys of `data.columns` whose arrays may not be missing where they are named
    """
    arrays = _named_arrays(file, data, needed)
    values = _finite_values(arrays["x"], file)
    has_targets = data.task in OF_TENSORS
    texts = {}
    for name in ARRAYS:
        is_text = name != "label" or not has_targets
        if name in arrays and is_text:
            column = arrays[name].astype(str)
            texts[name] = Cells.of(column.tolist())
    if has_targets:
        labels = checked_targets(arrays["label"], data.task, f"{file}, label")
    else:
        labels = names_of_labels(texts["label"], f"{file}, label", first_row=0)
    examples = Examples(values, labels)
    if "split" in texts:
        parts = _parts(texts["split"], str(file))
        examples = replace(examples, parts=parts)
    if "group" in texts:
        groups = _groups(texts["group"], f"{file}, group", first_row=0)
        examples = replace(examples, groups=groups)
    if "domain" not in texts:
        return {composed(file.stem): examples}
    return _by_domain(examples, text_of_names(texts["domain"]))


def _by_domain(examples: Examples, domains: np.ndarray) -> dict[str, Examples]:
    """The examples of each domain. domains: their names [N]"""
    by_domain = {}
    for domain in sorted(set(domains)):
        indices = np.flatnonzero(domains == domain)
        by_domain[domain] = examples.chosen(indices)
    return by_domain


def _named_arrays(file: Path, data: DataSettings, needed: Sequence[str]) -> dict[str, np.ndarray]:
    """The arrays of a file under our names; UserError where they do not fit, and where a needed one is missing.

    `data.columns` may give label, domain and split other names, and alone says which array has groups.
    """
    stored = _load_npz(file)
    names = {data.column(name, name): name for name in ("label", "domain", "split")}
    arrays = {}
    for name, array in stored.items():
        if name in names or name not in ARRAYS:  # one called label is not the label where the settings name another
            ours = names.get(name, name)
            arrays[ours] = array
    for name in needed:
        array_name = data.column(name, "")
        if array_name and array_name not in stored:
            hint = f"{nearest(array_name, stored)}it has: {', '.join(stored)}"
            raise UserError(f"{file} has no array {array_name!r} (data.columns.{name}); {hint}")
    group = data.column("group", "")
    if group:
        arrays["group"] = stored[group]
    _check_npz(arrays, file, data.task in OF_TENSORS)
    return arrays


def _check_npz(arrays: Mapping[str, np.ndarray], file: Path, has_targets: bool) -> None:
    """Raises UserError for a missing array, arrays of different lengths, and an `x` that is no [N, ...] of numbers.

    has_targets: labels are targets, whose shape is checked where they are read
    """
    for name in ("x", "label"):
        if name not in arrays:
            present = ", ".join(arrays) or "none"
            raise UserError(f"{file} has no array {name!r}; it has: {present}; needed are x [N, ...] and label [N]")
    x = arrays["x"]
    if x.dtype.kind not in "fiub" or x.ndim < 2 or not x.size:
        raise UserError(f"{file}: x is {x.dtype} of the shape {list(x.shape)}; it must be numbers [N, ...]")
    for name in ARRAYS:
        if name not in arrays:
            continue
        shape = arrays[name].shape
        is_label = name == "label"
        of_examples = shape[:1] if is_label and has_targets else shape
        if of_examples == (len(x),):
            continue
        hint = ""
        if is_label and len(shape) == 2:
            hint = "; several labels are data.task = 'multi-label'"
        raise UserError(f"{file}: {name} has the shape {list(shape)}, but x has {len(x)} examples{hint}")


def _finite_values(x: np.ndarray, file: Path) -> np.ndarray:
    """The examples [N, ...] as float32; UserError with the number of the first that is not finite."""
    values = x.astype(np.float32)
    rows = values.reshape(len(values), -1)
    finite = np.isfinite(rows).all(axis=1)
    if not finite.all():
        first = int(np.argmin(finite))
        raise UserError(f"{file}: x[{first}] holds NaN or infinity; replace such values, or leave the example out")
    return values


def _load_npz(file: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, KeyError) as error:
        reason = first_line(error)
        raise UserError(f"cannot read {file} ({reason}); write it with numpy.savez, without objects") from None
    except Exception as error:  # zipfile raises errors of its own for a damaged archive
        raise UserError(f"cannot read {file} ({first_line(error)}); write it with numpy.savez") from None


def _open_tables(data: DataSettings, tables: Mapping[Path, TextTable], usual: Mapping[str, str]) -> Opened:
    """The rows of one table, or of one for each domain."""
    pieces, columns = _pieces_by_domain(data, tables, columns_of(data, usual))
    used = used_of(sorted(pieces), data.domains)
    first = next(iter(tables))
    of_used = [rows for domain in used for _, rows in pieces[domain]]
    findings = category_findings(columns, of_used, first if len(tables) == 1 else first.parent)
    if not data.columns.get("features"):
        findings += left_out_columns(columns, tables)
    if data.missing == "drop":
        pieces = _without_incomplete(pieces, columns, used)
    columns = with_categories(columns, _rows_of_sources(data, pieces, used))
    domains = {domain: _encoded(of_domain, columns, data) for domain, of_domain in pieces.items()}
    if data.task in OF_TENSORS:
        classes = columns.labels
    else:
        used_domains = {domain: domains[domain] for domain in used}
        classes = _class_names(data, used_domains, first)
    refuse_alike([[name] for name in domains], "domains", first)
    return Opened(domains, classes, *_form_of_rows(columns, data.missing), findings=findings)


def _pieces_by_domain(
    data: DataSettings, tables: Mapping[Path, TextTable], columns: Columns
) -> tuple[dict[str, list[Piece]], Columns]:
    """({domain: its rows in each table}, the columns with their features); UserError for a column that is missing."""
    pieces: dict[str, list[Piece]] = {}
    for file, table in tables.items():
        for name, column in (("domain", columns.domain), ("split", columns.split)):
            if name in data.columns:
                _refuse_without(file, table, name, column)
        columns = with_features(columns, table.columns, file)
        for domain, rows in _rows_by_domain(file, table, columns):
            pieces.setdefault(domain, []).append((file, rows))
    return pieces, columns


def _refuse_without(file: Path, table: TextTable, name: str, column: str) -> None:
    """Raises UserError for a table without the column of domains or splits that the settings name."""
    if column in table:
        return
    header = table.columns
    hint = f"{nearest(column, header)}it has: {', '.join(header)}"
    remedy = "leave the setting out where there is none"
    if name == "domain":
        remedy = "where the name of each file is its domain, leave the setting out"
    raise UserError(f"{file} has no column {column!r}, which data.columns.{name} names; {hint}; {remedy}")


def _rows_by_domain(file: Path, table: TextTable, columns: Columns) -> list[tuple[str, TextTable]]:
    """The rows of each domain of a table, with their numbers in it; a table without domains is called like its file."""
    for label in columns.labels:
        if label not in table:
            hint = f"{nearest(label, table.columns)}it has: {', '.join(table.columns)}"
            remedy = f"name it with data.columns.label{one_hot_hint(table.frame())}"
            raise UserError(f"{file} has no column {label!r}; {hint}; {remedy}")
    if columns.domain not in table:
        return [(composed(file.stem), table)]
    cells = table[columns.domain]
    names = text_of_names(cells)
    for position in np.flatnonzero(names == "")[:1]:
        raise UserError(f"{file}, row {cells.row(position)}: the column {columns.domain!r} is empty")
    rows_by_domain = []
    for domain in sorted(set(names)):
        rows = table.chosen(names == domain)
        rows_by_domain.append((domain, rows))
    return rows_by_domain


def _without_incomplete(pieces: Pieces, columns: Columns, used: Sequence[str]) -> dict[str, list[Piece]]:
    """The complete rows of each domain; UserError for a used domain without any."""
    complete = {}
    for domain, of_domain in pieces.items():
        complete[domain] = [(file, complete_rows(rows, columns)) for file, rows in of_domain]
        count = sum(len(rows) for _, rows in complete[domain])
        if domain in used and not count:
            raise UserError(
                f"{domain}: every row has an empty cell, so that data.missing = 'drop' leaves none; take "
                "columns that are empty there out of data.columns.features"
            )
    return complete


def _rows_of_sources(data: DataSettings, pieces: Pieces, used: Sequence[str]) -> list[TextTable]:
    """The rows of the domains that train, of which the unseen one is none."""
    unseen = composed(data.unseen_domain) or used[-1]
    held_out = (unseen, composed(data.validation_domain))
    sources = [domain for domain in used if domain not in held_out]
    tables = []
    for domain in sources or used:
        tables += [rows for _, rows in pieces[domain]]
    return tables


def _encoded(pieces: Sequence[Piece], columns: Columns, data: DataSettings) -> Examples:
    """The examples of one domain."""
    values, labels, splits, groups = [], [], [], []
    for file, rows in pieces:
        values.append(encode(rows, columns, data.missing, str(file)))
        labels.append(_labels_of(rows, columns, data.task, file))
        if columns.split in rows:
            splits.append(_parts(rows[columns.split], str(file)))
        if columns.group:
            place = f"{file}, column {columns.group!r}"
            groups.append(_groups(rows[columns.group], place))
    examples = Examples(np.concatenate(values), np.concatenate(labels))
    if len(splits) == len(pieces):
        examples = replace(examples, parts=np.concatenate(splits))
    if groups:
        examples = replace(examples, groups=np.concatenate(groups))
    return examples


def _labels_of(rows: TextTable, columns: Columns, task: str, file: Path) -> np.ndarray:
    """The names of classes [N] of some rows, or their targets float32 [N, Q]."""
    if task not in OF_TENSORS:
        return names_of_labels(rows[columns.label], f"{file}, column {columns.label!r}")
    targets = []
    for name in columns.labels:
        column = targets_of(rows[name], task, f"{file}, column {name!r}")
        targets.append(column)
    return np.stack(targets, axis=1)


def _groups(cells: Cells, where: str, first_row: int = FIRST_ROW) -> np.ndarray:
    """The group of every example, as text [N]. `first_row`: the number of the first row.

    Raises UserError with the row for an empty cell, because nobody knows which other rows belong to it.
    """
    refuse_empty(cells, where, "group", first_row)
    return text_of_names(cells)


def _parts(cells: Cells, where: str) -> np.ndarray:
    """The part of every example: train, validation, test, or an empty text."""
    names = {text.lower() for text in cells.texts}
    unknown = sorted(names - {"", *PARTS})
    if unknown:
        hint = f"{nearest(unknown[0], PARTS)}known: {', '.join(PARTS)}, or nothing for an unused example"
        raise UserError(f"{where}: {unknown[0]!r} is no part of a split; {hint}")
    return cells.each(lambda text: PARTS.get(text.lower(), ""))


def _class_names(data: DataSettings, domains: Mapping[str, Examples], where: object) -> tuple[str, ...]:
    """The classes of the used domains: those that the settings name, or all that occur."""
    used = used_of(domains, data.domains)
    groups = [set(domains[domain].labels) for domain in used]
    occurring = set().union(*groups)
    named = set(map(composed, data.classes))
    unknown = sorted(occurring - named)
    if named and unknown:
        hint = f"{nearest(unknown[0], named)}known: {', '.join(sorted(named))}"
        raise UserError(f"{where}: the label {unknown[0]!r} is none of data.classes; {hint}")
    names = tuple(sorted(named or occurring, key=class_order))
    if len(names) < 2:
        present = ", ".join(names) or "missing"
        raise UserError(
            f"{where}: the labels are all {present}; at least 2 classes are needed; "
            "where other machines have the others, name all in data.classes"
        )
    alone = [{name} for name in names]
    refuse_alike(groups + alone, "labels", where)
    return names


def _checked(domains: Mapping[str, Examples], classes: tuple[str, ...], where: object) -> Opened:
    """The opened tensors; UserError when two domains have examples of different shapes."""
    shapes = {domain: examples.values.shape[1:] for domain, examples in domains.items()}
    first, shape = next(iter(shapes.items()))
    for domain, other in shapes.items():
        if other != shape:
            raise UserError(
                f"{where}: examples of {domain!r} have the shape {list(other)}, but those of {first!r} "
                f"have {list(shape)}; all need one shape"
            )
    in_order = dict(sorted(domains.items()))
    return Opened(in_order, classes, shape, (), shape[0])


def read_labelled(file: Path, data: DataSettings, bench: Benchmark) -> Labelled:
    """The labelled examples of each domain of a file, and what each is called, for a model of an earlier run.

    A table has the columns of the run, and an .npz file its arrays. Without domains in it there is one, called like the
    file. A split and groups are not read. With data.missing = 'drop', rows with an empty feature are left out.

    data, bench: the settings and the data set of the run

    Raises UserError for a file that lacks a column or an array, and for examples of another shape.
    """
    if not file.is_file():
        raise UserError(f"no file {file}; name a table of labelled rows ({', '.join(SUFFIXES)})")
    if _is_npz(file):
        return _read_labelled_npz(file, data, bench)
    columns, table = read_rows(file, data, bench)
    columns = replace(columns, split="")
    labelled = {}
    for domain, rows in _rows_by_domain(file, table, columns):
        names = [f"{file}, row {number + FIRST_ROW}" for number in rows.rows]
        labelled[domain] = _encoded([(file, rows)], columns, data), names
    return labelled


def _read_labelled_npz(file: Path, data: DataSettings, bench: Benchmark) -> Labelled:
    """The labelled examples of an .npz file; UserError where their shape is not that of the run."""
    columns = {name: column for name, column in data.columns.items() if name != "group"}
    without_groups = data.model_copy(update={"columns": columns})
    labelled = {}
    for domain, examples in _read_npz(file, without_groups, needed=()).items():
        shape = examples.values.shape[1:]
        if shape != bench.shape:
            raise UserError(f"{file}: examples have the shape {list(shape)}, and this model takes {list(bench.shape)}")
        names = [f"{domain}[{index}]" for index in range(len(examples.labels))]
        labelled[domain] = examples, names
    return labelled
