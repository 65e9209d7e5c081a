"""Image trees `root/domain/class/image`: finds the folders, lists the files, checks them against the benchmark."""

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsim.common.errors import UserError
from fedsim.data.findings import Finding
from fedsim.data.levels import levels_of, tree_of
from fedsim.data.names import matching, plain, read_from, same, subfolders
from fedsim.data.row import Benchmark
from fedsim.settings import DataSettings, data_root

LONGEST_ENDING = 4  # of the first part of an ending with two points
IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif"})
LISTED_SUFFIXES = ", ".join(sorted(IMAGE_SUFFIXES))
OF_PROGRAMS = (".", "__", "@")  # what the names of folders begin with that programs keep for themselves
SIDE_FILES = frozenset({
    ".txt", ".csv", ".tsv", ".json", ".xml", ".yaml", ".yml", ".toml", ".md", ".html", ".pdf", ".db", ".ini", ".log",
    ".mat", ".npy", ".npz", ".pkl", ".zip", ".tar", ".gz", ".sha256", ".md5",
})  # fmt: skip


@dataclass(frozen=True)
class Listing:
    """Image files of one domain in ImageFolder's order: by class, then by path; labels are class ranks [N].

    depth: how many folders the path of a file has up to its class, with the class itself
    """

    folder: Path
    files: tuple[str, ...]  # relative to `folder`
    labels: np.ndarray
    depth: int = 1

    @property
    def paths(self) -> list[Path]:
        """The files, to be opened."""
        return [self.folder / name for name in self.files]


def places(data: DataSettings, bench: Benchmark) -> list[Path]:
    """Where a data set may lie: the data root, and the folders below it that are called as the data set."""
    root = data_root(data)
    below = subfolders(root) if root.is_dir() else []
    named = [root / name for name in below if plain(name) in bench.folder]
    return [root, *named]


def dataset_folder(data: DataSettings, bench: Benchmark) -> Path:
    """Folder that holds the domain folders: the data root itself, or e.g. PACS/ below it.

    Raises UserError when neither holds a domain of the benchmark.
    """
    root = data_root(data)
    if not root.is_dir():
        where = f"{root}{read_from(root)}"
        raise UserError(f"{bench.title}: no folder {where}; set data.root or $FEDSIM_DATA to where the images are")
    if bench.name == "folder":
        return root
    possible = places(data, bench)
    for folder in possible:
        present = subfolders(folder)
        if any(matching(domain, present) for domain in bench.all_domains or bench.domains):
            return folder
    below = possible[1] if len(possible) > 1 else root / bench.title
    domains = ", ".join(bench.domains)
    raise UserError(
        f"{bench.title}: no domain folder ({domains}) in {root} or in {below}; put the images there as "
        "domain/class/image or set data.root or $FEDSIM_DATA"
    )


def list_domain(data: DataSettings, bench: Benchmark, domain: str) -> Listing:
    """Files and labels of one domain, checked: its folder, its classes, and at least the benchmark's image counts.

    Raises UserError for a missing folder, an empty or unknown class, a foreign file or missing images.
    """
    root = dataset_folder(data, bench)
    if data.levels:
        return _list_by_levels(root, data, bench, domain)
    folders = subfolders(root)
    find = matching if bench.folder else same
    name = find(domain, folders)
    if name is None:
        raise UserError(f"{bench.title}: domain {domain!r} has no folder in {root} (found: {', '.join(folders)})")
    folder = root / name
    lenient = bench.name == "folder" and bool(data.classes)  # named classes may be absent from a domain
    class_folders = _class_folders(bench, domain, folder, lenient)
    images = [images_of(folder, name) if name else [] for name in class_folders]
    _check_counts(bench, domain, folder, images, lenient)
    return listing_of(folder, images)


def listing_of(folder: Path, images: Sequence[Sequence[str]], depth: int = 1) -> Listing:
    """Returns the listing of the images of each class, which are paths below a folder; see `Listing` for `depth`."""
    counts = [len(of_class) for of_class in images]
    ranks = np.arange(len(images), dtype=np.int64)
    labels = np.repeat(ranks, counts)
    files = tuple(itertools.chain(*images))
    return Listing(folder, files, labels, depth)


def _list_by_levels(
    root: Path,
    data: DataSettings,
    bench: Benchmark,
    domain: str,
) -> Listing:
    """Files and labels of a domain whose class folders `data.levels` finds."""
    levels = levels_of(data)
    tree = tree_of(root, levels)
    if domain not in tree:
        place = f"{root}{read_from(root)}"
        raise UserError(f"no folder of the domain {domain!r} in {place}, read as data.levels = {data.levels!r} says")
    folders = tree[domain]
    images = []
    for name in bench.classes:
        of_class: list[str] = []
        for folder in sorted(folders.get(name, [])):
            of_class += images_of(root, folder)
        images.append(of_class)
    _check_counts(bench, domain, root, images, lenient=bool(data.classes))
    return listing_of(root, images, depth=len(levels))


def other_files(listings: Mapping[str, Listing]) -> list[Finding]:
    """A finding where the class folders of a domain hold files of other kinds, which stand next to no image.

    A file that has an image's name with another ending belongs to it, and one file of its kind is a note or a list.
    """
    findings = []
    for domain, listing in listings.items():
        suffixes = _other_suffixes(listing)
        several = {suffix: count for suffix, count in suffixes.items() if count > 1}
        if not several:
            continue
        kinds = _counted(sorted(several.items()))
        where = f"the class folders of {domain} next to its {len(listing.files):,} images"
        text = f"{kinds} files lie in {where} and are not read"
        remedy = "if they are images, write them as PNG"
        total = sum(several.values())
        findings.append(Finding("other-files", domain, total, text, remedy))
    return findings


def _other_suffixes(listing: Listing) -> Counter[str]:
    """The endings of the files next to the images of a domain that are no images and do not belong to one."""
    images: dict[str, set[str]] = {}  # {folder: the names of its images without their endings}
    for file in listing.files:
        folder, _, name = file.rpartition("/")
        stem, _, _ = name.rpartition(".")
        images.setdefault(folder, set()).add(stem)
    suffixes: Counter[str] = Counter()
    for folder, stems in images.items():
        for name in _side_files(listing.folder / folder):
            stem, suffix = _parted(name)
            suffixes[suffix] += stem not in stems
    return suffixes


def _side_files(folder: Path) -> list[str]:
    """The names of the visible files of a folder that are no images."""
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            is_read = is_image(entry.name) or entry.name.startswith(".")
            if not is_read and entry.is_file():
                names.append(entry.name)
    return names


def _side_text(folder: Path, name: str) -> str:
    """Which files that are not read lie in the folder of a class without images; empty for none."""
    suffixes: Counter[str] = Counter()
    for _, files in walk(folder / name):
        suffixes.update(suffix for _, suffix in map(_parted, files))
    if not suffixes:
        return ""
    kinds = _counted(suffixes.most_common(3))
    return f", whose {kinds} files are no images ({LISTED_SUFFIXES})"


def _counted(suffixes: Sequence[tuple[str, int]]) -> str:
    """`3 .txt, 2 .csv`"""
    return ", ".join(f"{count:,} {suffix}" for suffix, count in suffixes)


def _parted(name: str) -> tuple[str, str]:
    """(the stem, the ending with all its points): 'a.nii.gz' is ('a', '.nii.gz')."""
    stem, _, suffix = name.rpartition(".")
    inner, _, longer = stem.rpartition(".")
    if inner and longer.isalpha() and len(longer) <= LONGEST_ENDING:
        return inner, f".{longer}.{suffix}"
    return stem, f".{suffix}"


def _class_folders(
    bench: Benchmark,
    domain: str,
    folder: Path,
    lenient: bool,
) -> list[str]:
    """Names of the class folders on disk, in the order of the benchmark's classes; empty for one that may be absent."""
    present = subfolders(folder)
    find = matching if bench.folder else same
    by_class = {name: find(name, present) for name in bench.classes}
    missing = [name for name, on_disk in by_class.items() if on_disk is None]
    if missing and not lenient:
        first = missing[0]
        expected = ""
        if bench.class_counts:
            count = bench.class_counts[domain][bench.classes.index(first)]
            expected = f" (0 of {count} images)"
        lack = f"{len(missing)} of {len(bench.classes)} class folders are missing"
        raise UserError(
            f"{bench.title} {domain}: {lack} in {folder}, first {first!r}{expected}; copy the data set again"
        )
    unknown = sorted(set(present) - set(by_class.values()))
    if unknown:
        raise UserError(
            f"{bench.title} {domain}: {unknown[0]!r} in {folder} is none of the benchmark's classes; "
            "remove the folder or use data.dataset = 'folder'"
        )
    return [by_class[name] or "" for name in bench.classes]


def is_image(name: str) -> bool:
    """Whether a file of this name is read as an image."""
    suffix = Path(name).suffix.lower()
    return suffix in IMAGE_SUFFIXES and not name.startswith(".")


def images_of(folder: Path, class_folder: str) -> list[str]:
    """Relative paths of a class's images, sorted like ImageFolder does (folder by folder, then by name)."""
    images = []
    for parent, names in sorted(walk(folder / class_folder)):
        for name in sorted(names):
            path = Path(parent, name)
            if is_image(name):
                images.append(os.path.relpath(path, folder))
                continue
            is_side_file = name.startswith(".") or path.suffix.lower() in SIDE_FILES
            if not is_side_file:
                raise UserError(f"{path}: not an image file ({LISTED_SUFFIXES}); remove it")
    return images


def walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """(folder, names of its files) of a folder and all visible folders below it; links are followed.

    Folders whose names begin with a point, "__" or "@" hold what programs keep for themselves, such as thumbnails. A
    folder to which several links lead, or a link to a folder that contains it, is visited once.
    """
    seen: set[tuple[int, int]] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        status = Path(parent).stat()
        identity = status.st_dev, status.st_ino
        if identity in seen:
            folders.clear()
            continue
        seen.add(identity)
        folders[:] = sorted(name for name in folders if not name.startswith(OF_PROGRAMS))
        yield parent, names


def _check_counts(
    bench: Benchmark,
    domain: str,
    folder: Path,
    images: Sequence[Sequence[str]],
    lenient: bool,
) -> None:
    """Raises UserError for missing images, then for an empty class. More images than the benchmark has are accepted.

    images: the files of each class
    """
    counts = list(map(len, images))
    total = sum(counts)
    short = _short_classes(bench, domain, counts)
    if short:
        listed = ", ".join(short[:3])
        if len(short) > 3:
            listed += f" and {len(short) - 3} more classes are short"
        raise _incomplete(bench, domain, folder, listed)
    empty = [name for name, count in zip(bench.classes, counts) if count == 0]
    may_lack_some = lenient and total > 0
    if empty and not may_lack_some:
        others = _side_text(folder, empty[0])
        raise UserError(
            f"{bench.title} {domain}: no image of class {empty[0]!r} in {folder}{others}; every class needs images, "
            "unless all classes are named in data.classes"
        )
    if bench.counts and total < bench.counts[domain]:
        raise _incomplete(bench, domain, folder, f"{total} of {bench.counts[domain]} images")


def _short_classes(bench: Benchmark, domain: str, counts: Sequence[int]) -> list[str]:
    """How many images each class has that has fewer than in the benchmark, in words."""
    short = []
    expected = bench.class_counts[domain] if bench.class_counts else counts
    for name, count, of_benchmark in zip(bench.classes, counts, expected):
        if count < of_benchmark:
            short.append(f"{name} has {count} of {of_benchmark} images")
    return short


def _incomplete(
    bench: Benchmark,
    domain: str,
    folder: Path,
    present: str,
) -> UserError:
    return UserError(
        f"{bench.title} {domain} is incomplete in {folder}: {present}; copy the data set again, "
        "or use data.dataset = 'folder' for a part of it"
    )
