"""Image trees `root/domain/class/image`: finds the folders, lists the files, checks them against the benchmark."""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsim.common.errors import UserError
from fedsim.data.names import matching, plain, read_from, same, subfolders
from fedsim.data.row import Benchmark
from fedsim.settings import DataSettings, data_root

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif"})
SIDE_FILES = frozenset({
    ".txt", ".csv", ".tsv", ".json", ".xml", ".yaml", ".yml", ".toml", ".md", ".html", ".pdf", ".db", ".ini", ".log",
    ".mat", ".npy", ".npz", ".pkl", ".zip", ".tar", ".gz", ".sha256", ".md5",
})  # fmt: skip


@dataclass(frozen=True)
class Listing:
    """Image files of one domain in ImageFolder's order: by class, then by path; labels are class ranks [N]."""

    folder: Path
    files: tuple[str, ...]  # relative to `folder`
    labels: np.ndarray

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
    labels = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    return Listing(folder, tuple(itertools.chain(*images)), labels)


def _class_folders(bench: Benchmark, domain: str, folder: Path, lenient: bool) -> list[str]:
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


def _check_counts(bench: Benchmark, domain: str, folder: Path, counts: list[int], lenient: bool) -> None:
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
            f"{bench.title} {domain}: no image of class {empty[0]!r} in {folder}; every class needs images, "
            "unless all classes are named in data.classes"
        )
    if bench.counts and sum(counts) < bench.counts[domain]:
        raise UserError(
            f"{bench.title} {domain} is incomplete in {folder}: {sum(counts)} of {bench.counts[domain]} "
            "images; copy the data set again, or use data.dataset = 'folder' for a part of it"
        )
