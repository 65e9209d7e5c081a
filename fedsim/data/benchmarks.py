"""Finds the data set that the settings name, and its domains (no torch, no images read).

benchmark(DataSettings(dataset="pacs")).domains  ->  ("art_painting", "cartoon", "photo", "sketch")
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedsim.common.errors import UserError, nearest
from fedsim.common.tasks import BINARY, OF_TENSORS, TASKS
from fedsim.data.array_rows import MAPPING, is_mapping
from fedsim.data.catalog import BENCHMARKS
from fedsim.data.findings import joined_names
from fedsim.data.hf_rows import ROW, is_federated
from fedsim.data.levels import levels_of, refuse_unclear_levels, tree_of
from fedsim.data.lists import PARTS
from fedsim.data.names import composed, matching, read_from, refuse_alike, refuse_repeated, same
from fedsim.data.reader import Reader
from fedsim.data.row import Benchmark
from fedsim.settings import DataSettings, data_root
from fedsim.settings.plugins import instance, load, lookup
from fedsim.settings.run import NO_TARGET

ClassFolders = Mapping[str, list[str]]  # the sorted classes of each domain
AVERAGE = "average"  # the column of tables
# What no domain can be called, and why.
RESERVED = {
    AVERAGE: "the name of the column of averages",
    "all": "which stands for every domain in --targets",
    NO_TARGET: "which stands for a run in which every domain trains",
}


def find_dataset(name: str) -> Benchmark:
    """The data set of that name: a row of BENCHMARKS, of an installed package, or `module:name`.

    `module:name` is a Benchmark, or a function that is declared to return one. It may be a Reader class that has one as
    its attribute `benchmark` and then reads it, or a `FederatedDataset` of flwr-datasets. It may also be a mapping from
    domains to torch Datasets of (tensor, target), or a function that is declared to return one.
    UserError gives the nearest known name.
    """
    where = "data.dataset: no data set"
    row = lookup(name, BENCHMARKS, "datasets", where)
    if is_federated(row):
        return ROW
    if is_mapping(row):
        return MAPPING
    is_reader = isinstance(row, type) and issubclass(row, Reader)
    of_reader = getattr(row, "benchmark", None) if is_reader else None
    if isinstance(of_reader, Benchmark):
        return replace(of_reader, reader=f"{row.__module__}:{row.__qualname__}")
    return instance(row, Benchmark, f"{where} {name!r}: it")


def benchmark(data: DataSettings) -> Benchmark:
    """The benchmark that the settings name, with the chosen `data.domains`.

    Domains come in the (sorted) order of the benchmark, whatever the order of `data.domains`. Raises UserError with the
    nearest name for an unknown data set or domain.
    """
    bench = find_dataset(data.dataset)
    refuse_repeated(data.classes, "data.classes")
    if bench.discover:
        bench = load(bench.discover, "data set")(data, bench)
    of_variant = bench.variants.get(data.variant, {})
    bench = with_task(replace(bench, **of_variant), data)
    for name in data.domains or bench.domains:
        reason = unusable(name)
        if reason:
            raise UserError(f"{bench.title}: a domain cannot be called {name!r}, {reason}; rename it")
    if not data.domains:
        return bench
    chosen = sorted(resolve_domain(bench, name) for name in data.domains)
    refuse_repeated(chosen, "data.domains")
    return replace(bench, domains=tuple(chosen), all_domains=bench.domains)


def with_task(bench: Benchmark, data: DataSettings) -> Benchmark:
    """The data set with the task that `data.task` names; UserError for one that its labels cannot be learned by."""
    task = data.task or bench.task
    if task in OF_TENSORS and not bench.takes_targets:
        raise UserError(
            f"data.task = {task!r}: {bench.title} has classes; targets that are numbers or several labels "
            "come from data.dataset = 'arrays', or from Datasets by domain"
        )
    has_classes = TASKS[bench.task].has_classes
    if task != bench.task and not has_classes:
        raise UserError(f"data.task = {task!r}: {bench.title} is a data set for {bench.task}; leave data.task out")
    has_two_classes = len(bench.classes) == 2
    if task == BINARY.name and bench.classes and not has_two_classes:
        title = data.root if bench.name == "arrays" else bench.title
        classes = ", ".join(bench.classes)
        raise UserError(
            f"data.task = 'binary' needs two classes, and {title} has {len(bench.classes)}: {classes}; write a column "
            "that has two, such as yes for all grades above 0 (without data.task each of these is a class of its own)"
        )
    return replace(bench, task=task)


def task_of_data(data: DataSettings) -> str:
    """The name of the task of a data set, before its files are looked at."""
    return data.task or find_dataset(data.dataset).task


def unusable(name: str) -> str:
    """Why no domain can have this name, in words; empty for a name that can be used."""
    if name.casefold() in RESERVED:
        return RESERVED[name.casefold()]
    if "/" in name or name in (".", ".."):
        return "because a run's folder is called like its unseen domain, and this is no name of one folder"
    return "" if name.isprintable() else "which has characters that are not printed"


def resolve_domain(bench: Benchmark, name: str) -> str:
    """A domain's name as the benchmark spells it; UserError with the nearest one when there is none.

    The names of a published benchmark may have other separators and another case; those of a folder are exact.
    """
    find = matching if bench.folder else same
    domain = find(name, bench.domains)
    if domain is None:
        hint = nearest(name, bench.domains)
        domains = ", ".join(bench.domains)
        raise UserError(f"{bench.title} has no domain {name!r}; {hint}known: {domains}")
    return domain


def resolve_target(bench: Benchmark, name: str) -> str:
    """The unseen domain's name as the benchmark spells it, or NO_TARGET; UserError for any other name."""
    return name if name == NO_TARGET else resolve_domain(bench, name)


def discover(data: DataSettings, row: Benchmark) -> Benchmark:
    """The row with the domains and classes of a tree root/domain/class/image.

    Domains of the settings may be missing here, because they are on other sites. Where all are, and the settings name
    the classes, no folder is read. Where classes are named, a domain may lack some of them, because hospitals differ.
    """
    root = data_root(data)
    asked = sorted(map(composed, data.domains))
    named = sorted(map(composed, data.classes))
    if asked and len(named) > 1 and not _has_any(root, data):
        return replace(row, domains=tuple(asked), classes=tuple(named))
    if not root.is_dir():
        hint = "set data.root or $FEDSIM_DATA; a server without images needs data.domains and data.classes"
        raise UserError(f"no folder of images {root}{read_from(root)}; {hint}")
    refuse_unclear_levels(root, data)
    levels = levels_of(data)
    tree = tree_of(root, levels)
    on_disk = sorted(tree)
    _refuse_missing_domains(root, asked, on_disk)
    classes_of = {name: sorted(tree[name]) for name in on_disk if not asked or name in asked}
    if not classes_of:
        expected = "/".join(levels)
        raise UserError(f"no domain folders in {root}: expected {expected}/image below it; set data.root")
    classes = _common_classes(root, classes_of, named)
    domains = tuple(sorted({*on_disk, *asked}))
    return replace(row, domains=domains, classes=tuple(classes))


def _has_any(root: Path, data: DataSettings) -> bool:
    """Whether any domain of the settings has a folder here."""
    if not data.levels:
        return any((root / name).is_dir() for name in data.domains)
    on_disk = tree_of(root, levels_of(data)) if root.is_dir() else {}
    return any(composed(name) in on_disk for name in data.domains)


def _refuse_missing_domains(root: Path, asked: Sequence[str], on_disk: Sequence[str]) -> None:
    """UserError for a domain of the settings that is a misspelled folder, or where no folder is a domain of these."""
    for name in set(asked) - set(on_disk):
        hint = nearest(name, set(on_disk) - set(asked))
        if hint or not set(asked) & set(on_disk):
            present = ", ".join(on_disk) or "no folder"
            raise UserError(f"no domain folder {name!r} in {root}; {hint}found: {present}")
    groups = [asked] if asked else [[name] for name in on_disk]
    refuse_alike(groups, "domains", root)


def _common_classes(root: Path, classes_of: ClassFolders, named: list[str]) -> list[str]:
    """The classes of all domains: those that the settings name, or those of each domain, which must then be equal."""
    first = next(iter(classes_of))
    if named:
        classes = named
        _refuse_unknown_classes(root, classes_of, named)
    else:
        classes = classes_of[first]
        _refuse_different_classes(root, classes_of)
    each = [[name] for name in classes]
    refuse_alike([*classes_of.values(), *each], "classes", root)
    if len(classes) < 2:
        _refuse_plain(root, classes_of)
        where = root / first
        raise UserError(f"{where}: {len(classes)} class folder(s); at least 2 are needed (domain/class/image)")
    if {name.casefold() for name in classes} <= PARTS.keys():
        names = ", ".join(classes)
        raise UserError(
            f"{root}: the class folders are called {names}, which are parts of a split; expected domain/class/image: "
            "put the images of a class into one folder, or name them in a table with the column split "
            "(data.dataset = 'table')"
        )
    return classes


def _refuse_unknown_classes(root: Path, classes_of: ClassFolders, named: list[str]) -> None:
    """UserError for a domain with a class folder that the settings do not name."""
    for name, of_domain in classes_of.items():
        unknown = sorted(set(of_domain) - set(named))
        if unknown:
            shown = ", ".join(unknown[:5])
            raise UserError(f"{root / name}: the class folders are not data.classes ({shown})")


def _refuse_different_classes(root: Path, classes_of: ClassFolders) -> None:
    """UserError for a domain with other class folders than the first one."""
    first = next(iter(classes_of))
    classes = classes_of[first]
    for name, of_domain in classes_of.items():
        if of_domain != classes:
            difference = sorted(set(of_domain) ^ set(classes))
            shown = ", ".join(difference[:5])
            raise UserError(
                f"{root}: domains {first!r} and {name!r} have different class folders ({shown}); every domain needs "
                "the same classes; set data.domains, or name all classes in data.classes"
            )


def _refuse_plain(root: Path, classes_of: ClassFolders) -> None:
    """Raises UserError where no folder of the root has folders, so that it holds classes of images and no domains."""
    if len(classes_of) > 1 and not any(classes_of.values()):
        names = joined_names(sorted(classes_of))
        raise UserError(
            f"{root}: the images lie in {names} themselves. If these are domains, put the images into a folder for "
            "each class, domain/class/image; if they are classes, the images have no domains, of which one must be "
            "unseen: make a folder for each, or name them in a table (data.dataset = 'table')"
        )
