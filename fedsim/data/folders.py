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
    return [root, *(root / name for name in below if plain(name) in bench.folder)]


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
        if any(matching(domain, subfolders(folder)) for domain in bench.all_domains or bench.domains):
            return folder
    raise UserError(
        f"{bench.title}: no domain folder ({', '.join(bench.domains)}) in {root} or in "
        f"{(possible[1:] or [root / bench.title])[0]}; put the images there as domain/class/image "
        "or set data.root or $FEDSIM_DATA"
    )


def list_domain(data: DataSettings, bench: Benchmark, domain: str) -> Listing:
    """Files and labels of one domain, checked: its folder, its classes, and at least the benchmark's image counts.

    Raises UserError for a missing folder, an empty or unknown class, a foreign file or missing images.
    """
    root = dataset_folder(data, bench)
    if data.levels:
        return _list_by_levels(root, data, bench, domain)
    name = (matching if bench.folder else same)(domain, subfolders(root))
    if name is None:
        raise UserError(
            f"{bench.title}: domain {domain!r} has no folder in {root} (found: {', '.join(subfolders(root))})"
        )
    folder = root / name
    lenient = bench.name == "folder" and bool(data.classes)  # named classes may be absent from a domain
    class_folders = _class_folders(bench, domain, folder, lenient)
    images = [images_of(folder, name) if name else [] for name in class_folders]
    counts = list(map(len, images))
    _check_counts(bench, domain, folder, counts, lenient)
    return Listing(folder, tuple(itertools.chain(*images)), _labels_of(counts))


def _labels_of(counts: Sequence[int]) -> np.ndarray:
    """The labels int64 [N] of images that stand class by class."""
    return np.repeat(np.arange(len(counts), dtype=np.int64), counts)


def _list_by_levels(
    root: Path,
    data: DataSettings,
    bench: Benchmark,
    domain: str,
) -> Listing:
    """Files and labels of a domain whose class folders `data.levels` finds."""
    levels = levels_of(data)
    folders = tree_of(root, levels)[domain]
    images = []
    for name in bench.classes:
        images.append([file for folder in sorted(folders.get(name, [])) for file in images_of(root, folder)])
    counts = list(map(len, images))
    _check_counts(bench, domain, root, counts, lenient=bool(data.classes))
    return Listing(root, tuple(itertools.chain(*images)), _labels_of(counts), depth=len(levels))


def other_files(listings: Mapping[str, Listing]) -> list[Finding]:
    """A finding where the class folders of a domain hold files of other kinds, which stand next to no image.

    A file that has an image's name with another ending belongs to it, and one file of its kind is a note or a list.
    """
    findings = []
    for domain, listing in listings.items():
        images: dict[str, set[str]] = {}  # {folder: the names of its images without their endings}
        for file in listing.files:
            folder, _, name = file.rpartition("/")
            images.setdefault(folder, set()).add(name.rpartition(".")[0])
        counts: Counter[str] = Counter()
        for folder, stems in images.items():
            for name in _side_files(listing.folder / folder):
                stem, suffix = _parted(name)
                counts[suffix] += stem not in stems
        several = {suffix: count for suffix, count in counts.items() if count > 1}
        if several:
            kinds = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(several.items()))
            text = f"{kinds} files lie in the class folders of {domain} next to its {len(listing.files):,} images and "
            text += "are not read"
            remedy = "if they are images, write them as PNG"
            findings.append(Finding("other-files", domain, sum(several.values()), text, remedy))
    return findings


def _side_files(folder: Path) -> list[str]:
    """The names of the visible files of a folder that are no images."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if not is_image(entry.name) and entry.is_file()]
    return [name for name in names if not name.startswith(".")]


def _side_text(folder: Path, name: str) -> str:
    """Which files that are not read lie in the folder of a class without images; empty for none."""
    endings = Counter(_parted(file)[1] for _, files in walk(folder / name) for file in files)
    if not endings:
        return ""
    kinds = ", ".join(f"{count:,} {ending}" for ending, count in endings.most_common(3))
    return f", whose {kinds} files are no images ({', '.join(sorted(IMAGE_SUFFIXES))})"


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
    by_class = {name: (matching if bench.folder else same)(name, present) for name in bench.classes}
    missing = [name for name, on_disk in by_class.items() if on_disk is None]
    if missing and not lenient:
        index = bench.classes.index(missing[0])
        expected = f" (0 of {bench.class_counts[domain][index]} images)" if bench.class_counts else ""
        raise UserError(
            f"{bench.title} {domain}: {len(missing)} of {len(bench.classes)} class folders are missing in "
            f"{folder}, first {missing[0]!r}{expected}; copy the data set again"
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
    return Path(name).suffix.lower() in IMAGE_SUFFIXES and not name.startswith(".")


def images_of(folder: Path, class_folder: str) -> list[str]:
    """Relative paths of a class's images, sorted like ImageFolder does (folder by folder, then by name)."""
    images = []
    for parent, names in sorted(walk(folder / class_folder)):
        for name in sorted(names):
            if is_image(name):
                images.append(os.path.relpath(Path(parent, name), folder))
            elif not (name.startswith(".") or Path(name).suffix.lower() in SIDE_FILES):
                raise UserError(
                    f"{Path(parent, name)}: not an image file ({', '.join(sorted(IMAGE_SUFFIXES))}); remove it"
                )
    return images


def walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """(folder, names of its files) of a folder and all visible folders below it; links are followed.

    Folders whose names begin with a point, "__" or "@" hold what programs keep for themselves, such as thumbnails. A
    folder to which several links lead, or a link to a folder that contains it, is visited once.
    """
    seen: set[tuple[int, int]] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        status = Path(parent).stat()
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__", "@")))
        yield parent, names


def _check_counts(
    bench: Benchmark,
    domain: str,
    folder: Path,
    counts: list[int],
    lenient: bool,
) -> None:
    """Raises UserError for missing images, then for an empty class. More images than the benchmark has are accepted."""
    expected = bench.class_counts[domain] if bench.class_counts else counts
    short = [row for row in zip(bench.classes, counts, expected) if row[1] < row[2]]
    if short:
        listed = ", ".join(f"{name} has {has} of {of} images" for name, has, of in short[:3])
        more = f" and {len(short) - 3} more classes are short" if len(short) > 3 else ""
        raise UserError(
            f"{bench.title} {domain} is incomplete in {folder}: {listed}{more}; copy the data set again, "
            "or use data.dataset = 'folder' for a part of it"
        )
    empty = [name for name, has in zip(bench.classes, counts) if has == 0]
    if empty and (not lenient or not any(counts)):
        raise UserError(
            f"{bench.title} {domain}: no image of class {empty[0]!r} in {folder}{_side_text(folder, empty[0])}; every "
            "class needs images, unless all classes are named in data.classes"
        )
    if bench.counts and sum(counts) < bench.counts[domain]:
        raise UserError(
            f"{bench.title} {domain} is incomplete in {folder}: {sum(counts)} of {bench.counts[domain]} "
            "images; copy the data set again, or use data.dataset = 'folder' for a part of it"
        )
