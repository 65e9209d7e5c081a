"""Inspects a folder or table of images before training: what it contains, and which problems it has."""

import io
import itertools
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from PIL import Image

from fedsim.common.errors import UserError
from fedsim.common.files import write_figure
from fedsim.data.benchmarks import benchmark
from fedsim.data.cache import digest
from fedsim.data.findings import lines_of
from fedsim.data.folders import IMAGE_SUFFIXES, Listing
from fedsim.data.image_tree import ImageTree
from fedsim.data.inspect_tables import is_table_of_numbers
from fedsim.data.levels import levels_of, refuse_unclear_levels, tree_of
from fedsim.data.names import subfolders
from fedsim.data.pixel_findings import pixel_findings, tally_of
from fedsim.data.pixels import Measures, MissingImageError, decode, decode_measured, read_bytes
from fedsim.data.reader import reader
from fedsim.data.row import Benchmark
from fedsim.settings import DataSettings
from fedsim.settings.experiment import Experiment, parse_experiment, parse_override

MOST = 20_000  # images opened of one domain; of a larger one, evenly spaced ones
SMALL = 16  # pixels to which images are decoded, which reads them to the end
SHOWN = 20  # problems of one kind that are listed
ORIENTATION = 0x0112  # EXIF tag; 1 is upright
CELL = 96  # pixels of a picture in the grid
SETTINGS = ("data.classes", "data.columns", "data.domains", "data.levels", "data.task")


class Found(NamedTuple):
    """The result of the inspection of one file; `treated`: what decoding does with it besides reading RGB values."""

    file: Path
    domain: str
    label: int
    size: tuple[int, int] = (0, 0)
    mode: str = ""
    digest: bytes = b""
    treated: tuple[str, ...] = ()
    problem: str = ""
    is_missing: bool = False
    measures: Measures | None = None  # None where the file cannot be read


@dataclass
class Inspection:
    """Counts [domain x class], image sizes and modes per domain, problems in words, and one image per cell."""

    counts: pd.DataFrame
    domains: pd.DataFrame
    problems: list[str] = field(default_factory=list)
    examples: dict[tuple[str, str], Path] = field(default_factory=dict)


def inspect(path: Path, overrides: Sequence[str] = ()) -> Inspection:
    """Inspects a folder DOMAIN/CLASS/IMAGE or a table; `overrides`: key=value of SETTINGS, as for a run.

    Every image is read to its end (at most 20,000 per domain). The result names files that cannot be read, classes
    without images, images next to class folders, and files with equal bytes in two classes or two domains. It counts
    other duplicates. Raises UserError where there are no domains and classes, and for an override without effect here.
    """
    usual = _settings(path, given_in(overrides, path))
    data = _with(overrides, path, usual)
    bench = benchmark(data)
    read = reader(data, bench)
    assert isinstance(read, ImageTree)  # folders and tables have files
    counts, rows, files = [], [], []
    problems: list[str] = []
    examples: dict[tuple[str, str], Path] = {}
    for domain in bench.domains:
        listing = read.listing(domain)
        checked = _check_domain(domain, listing)
        fine = [each for each in checked if not each.problem]
        rows.append(_summary(domain, len(listing.files), checked, fine))
        counts.append(np.bincount(listing.labels, minlength=len(bench.classes)))
        problems += _problems_of_files(read, domain, checked)
        problems += _absent_classes(path, domain, bench.classes, counts[-1])
        for each in fine:
            examples.setdefault((domain, bench.classes[each.label]), each.file)
        files += fine
    problems += _loose(path)
    problems += _doubles(files, bench.classes) + lines_of(read.findings())
    return Inspection(_by_domain(counts, bench), pd.DataFrame(rows), problems, examples)


def _by_domain(counts: list[np.ndarray], bench: Benchmark) -> pd.DataFrame:
    """Counts [domain x class] with the names of both."""
    domains = pd.Index(bench.domains, name="domain")
    return pd.DataFrame(counts, index=domains, columns=list(bench.classes))


def _problems_of_files(read: ImageTree, domain: str, checked: list[Found]) -> list[str]:
    """The files of a domain that are missing or cannot be read, and what the others lose when they are decoded."""
    missing = read.missing_text(domain)
    faults = [each.problem for each in checked if each.problem and not each.is_missing]
    measured = [each.measures for each in checked if each.measures]
    listed = _listed(faults, f"in {domain}")
    return [*filter(None, [missing]), *listed, *lines_of(pixel_findings(domain, tally_of(measured)))]


def _absent_classes(path: Path, domain: str, classes: Sequence[str], counts: np.ndarray) -> list[str]:
    """A line when a domain has no image of some classes; none when it has images of all."""
    absent = [name for name, count in zip(classes, counts) if not count]
    if not absent:
        return []
    hint = "" if path.is_file() else "; to train on it, name all classes in data.classes"
    return [f"{domain} has no image of {', '.join(absent)}{hint}"]


def _check_domain(domain: str, listing: Listing) -> list[Found]:
    """What is found in the images of a domain: in all of them, or in MOST evenly spaced ones."""
    count = len(listing.files)
    chosen = np.unique(np.linspace(0, count - 1, min(MOST, count)).astype(int))
    paths = [listing.folder / listing.files[index] for index in chosen]
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(_check, paths, itertools.repeat(domain), listing.labels[chosen].tolist()))


def _settings(path: Path, given: DataSettings) -> DataSettings:
    """Settings that read the whole folder or table, even where a domain lacks classes. given: names and levels"""
    if path.is_file():
        if is_table_of_numbers(path, given):
            raise UserError(f"{path} is a table of numbers, for data.dataset = 'arrays', and no table of images")
        return DataSettings(dataset="table", root=str(path))
    if form := _other_form(path):
        inspected = "this command inspects folders DOMAIN/CLASS/IMAGE and tables only"
        raise UserError(f"{path} looks like data for data.dataset = {form!r}; {inspected}")
    refuse_unclear_levels(path, given)
    classes = sorted(set().union(*tree_of(path, levels_of(given)).values()))
    return DataSettings(dataset="folder", root=str(path), classes=classes if len(classes) > 1 else [])


def given_in(overrides: Sequence[str], path: Path = Path("table")) -> DataSettings:
    """Settings that have only what `overrides` say of a table's columns or a folder's levels; see `inspect`."""
    return _with(overrides, path, DataSettings(dataset="arrays"))


def _with(overrides: Sequence[str], path: Path, data: DataSettings) -> DataSettings:
    """The settings with the user's own; UserError for one that the inspection does not read."""
    for text in overrides:
        key = ".".join(parse_override(text)[0].split(".")[:2])
        if key not in SETTINGS:
            raise UserError(f"--set {text}: an inspection reads only {', '.join(SETTINGS[:-1])} and {SETTINGS[-1]}")
        if key == "data.columns" and path.is_dir():
            raise UserError(f"--set {text}: {path} is a folder, which has no columns")
    return parse_experiment(Experiment(data=data).toml(), overrides).data if overrides else data


def _other_form(path: Path) -> str:
    """The form of a folder that is not DOMAIN/CLASS/IMAGE but another one that fedsim reads; else an empty string."""
    if any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):  # of `save_to_disk`
        return "hugging-face"
    domains = [path / name for name in subfolders(path)] if path.is_dir() else []
    masks = [(each / "samples.csv").is_file() or {"image", "mask"} <= set(subfolders(each)) for each in domains]
    return "masks" if masks and all(masks) else ""


def _check(file: Path, domain: str, label: int) -> Found:
    try:
        content = read_bytes(file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, of images that are decoded all the same
            measures = decode_measured(file, SMALL, content)[2]
            with Image.open(io.BytesIO(content)) as image:
                size, mode, treated = image.size, image.mode, treatment(image)
    except UserError as error:
        return Found(file, domain, label, problem=str(error), is_missing=isinstance(error, MissingImageError))
    return Found(file, domain, label, size, mode, digest(content), treated, measures=measures)


def treatment(image: Image.Image) -> tuple[str, ...]:
    """What decoding does with an opened image, in the words of the inspection; nothing for upright RGB or grey."""
    treated = ["turned (EXIF)"] if image.getexif().get(ORIENTATION, 1) in range(2, 9) else []
    if image.has_transparency_data:
        treated.append("transparent on white")
    elif image.mode.startswith(("I", "F")):
        treated.append("scaled to 8 bits")
    elif image.mode not in ("RGB", "L", "1"):
        treated.append("palette to RGB" if image.mode == "P" else f"{image.mode} to RGB")
    if getattr(image, "n_frames", 1) > 1:
        treated.append("first frame only")
    return tuple(treated)


def _summary(domain: str, images: int, checked: list[Found], fine: list[Found]) -> dict[str, str | int]:
    widths, heights = zip(*(each.size for each in fine)) if fine else ((), ())
    modes = Counter(each.mode for each in fine)
    treated = Counter(word for each in fine for word in each.treated)
    return {
        "domain": domain,
        "images": images,
        "read": len(checked),
        "width": _span(widths),
        "height": _span(heights),
        "modes": ", ".join(f"{mode} {count}" for mode, count in modes.most_common()),
        "converted": ", ".join(f"{count} {word}" for word, count in treated.most_common()) or "-",
    }


def _span(sides: Sequence[int]) -> str:
    return "-".join(map(str, sorted({min(sides), max(sides)}))) if sides else "-"


def _listed(problems: list[str], where: str) -> list[str]:
    more = len(problems) - SHOWN
    return problems[:SHOWN] + ([f"and {more} more such files {where}"] if more > 0 else [])


def _loose(path: Path) -> list[str]:
    """A line for each image of a folder that is not in a class folder."""
    places = [path, *(path / name for name in subfolders(path))] if path.is_dir() else []
    files = [file for place in places for file in sorted(place.iterdir()) if file.is_file()]
    images = [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]
    return _listed([f"{file} is in no class folder and is not read" for file in images], "next to class folders")


def _doubles(files: list[Found], classes: tuple[str, ...]) -> list[str]:
    groups: dict[bytes, list[Found]] = {}
    for each in files:
        groups.setdefault(each.digest, []).append(each)
    doubled = [group for group in groups.values() if len(group) > 1]
    two_classes = [group for group in doubled if len({each.label for each in group}) > 1]
    two_domains = [group for group in doubled if group not in two_classes and len({each.domain for each in group}) > 1]
    rest = sum(len(group) - 1 for group in doubled if group not in two_classes and group not in two_domains)
    pairs = [sorted(group, key=lambda each: each.label) for group in two_classes]
    texts = _listed([f"{pair[0].file} and {pair[-1].file} are the same image in two classes, {classes[pair[0].label]} "
                    f"and {classes[pair[-1].label]}" for pair in pairs], "in two classes")  # fmt: skip
    texts += _listed([f"{group[0].file} and {group[-1].file} are the same image in two domains"
                     for group in two_domains], "in two domains")  # fmt: skip
    return texts + ([f"{rest} images occur more than once in their domain and class"] if rest else [])


def draw_grid(found: Inspection, file: Path, columns: int = 10) -> Path:
    """PNG with a row of images per domain and a column per class (the first ones); cells without image stay empty."""
    from matplotlib.figure import Figure

    classes, domains = list(found.counts.columns[:columns]), list(found.counts.index)
    figure = Figure(figsize=(1.1 * len(classes) + 1.4, 1.15 * len(domains) + 0.5), layout="constrained")
    axes = figure.subplots(len(domains), len(classes), squeeze=False)
    for row, domain in enumerate(domains):
        for column, name in enumerate(classes):
            cell = axes[row][column]
            cell.set(xticks=[], yticks=[])
            if (domain, name) in found.examples:
                cell.imshow(decode(found.examples[domain, name], CELL).transpose(1, 2, 0))
            if row == 0:
                cell.set_title(name.replace("$", r"\$"), fontsize=8)
            if column == 0:
                cell.set_ylabel(domain.replace("$", r"\$"), fontsize=8)
    write_figure(figure, file, dpi=120)
    return file
