"""Inspects a folder or table of images before training: what it contains, and which problems it has."""

import io
import itertools
import warnings
from collections import Counter
from collections.abc import Collection, Sequence
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
    counts, summaries = [], []
    readable: list[Found] = []
    problems: list[str] = []
    for domain in bench.domains:
        listing = read.listing(domain)
        checked = _check_domain(domain, listing)
        summaries.append(_summary(domain, listing, checked))
        counts.append(np.bincount(listing.labels, minlength=len(bench.classes)))
        problems += _problems_of_files(read, domain, checked)
        problems += _absent_classes(path, domain, bench.classes, counts[-1])
        readable += [file for file in checked if not file.problem]
    problems += _loose(path)
    problems += _doubles(readable, bench.classes)
    problems += lines_of(read.findings())
    return Inspection(
        counts=_by_domain(counts, bench),
        domains=pd.DataFrame(summaries),
        problems=problems,
        examples=_first_files(readable, bench.classes),
    )


def _by_domain(counts: list[np.ndarray], bench: Benchmark) -> pd.DataFrame:
    """Counts [domain x class] with the names of both."""
    domains = pd.Index(bench.domains, name="domain")
    return pd.DataFrame(counts, index=domains, columns=list(bench.classes))


def _first_files(files: list[Found], classes: Sequence[str]) -> dict[tuple[str, str], Path]:
    """The first of the files of each domain and class."""
    first: dict[tuple[str, str], Path] = {}
    for each in files:
        cell = (each.domain, classes[each.label])
        first.setdefault(cell, each.file)
    return first


def _problems_of_files(read: ImageTree, domain: str, checked: list[Found]) -> list[str]:
    """The files of a domain that are missing or cannot be read, and what the others lose when they are decoded."""
    problems = []
    missing = read.missing_text(domain)
    if missing:
        problems.append(missing)
    faults = [file.problem for file in checked if file.problem and not file.is_missing]
    problems += _listed(faults, f"in {domain}")
    measured = [file.measures for file in checked if file.measures]
    findings = pixel_findings(domain, tally_of(measured))
    return problems + lines_of(findings)


def _absent_classes(path: Path, domain: str, classes: Sequence[str], counts: np.ndarray) -> list[str]:
    """A line when a domain has no image of some classes; none when it has images of all."""
    absent = [name for name, count in zip(classes, counts) if not count]
    if not absent:
        return []
    hint = "; to train on it, name all classes in data.classes"
    if path.is_file():
        hint = ""
    return [f"{domain} has no image of {', '.join(absent)}{hint}"]


def _check_domain(domain: str, listing: Listing) -> list[Found]:
    """What is found in the images of a domain: in all of them, or in MOST evenly spaced ones."""
    count = len(listing.files)
    spaced = np.linspace(0, count - 1, min(MOST, count))
    chosen = np.unique(spaced.astype(int))
    paths = [listing.folder / listing.files[index] for index in chosen]
    labels = listing.labels[chosen].tolist()
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(_check, paths, itertools.repeat(domain), labels))


def _settings(path: Path, given: DataSettings) -> DataSettings:
    """Settings that read the whole folder or table, even where a domain lacks classes. given: names and levels"""
    if path.is_file():
        if is_table_of_numbers(path, given):
            raise UserError(f"{path} is a table of numbers, for data.dataset = 'arrays', and no table of images")
        return DataSettings(dataset="table", root=str(path))
    form = _other_form(path)
    if form:
        inspected = "this command inspects folders DOMAIN/CLASS/IMAGE and tables only"
        raise UserError(f"{path} looks like data for data.dataset = {form!r}; {inspected}")
    refuse_unclear_levels(path, given)
    tree = tree_of(path, levels_of(given))
    classes = sorted(set().union(*tree.values()))
    if len(classes) < 2:
        classes = []
    return DataSettings(dataset="folder", root=str(path), classes=classes)


def given_in(overrides: Sequence[str], path: Path = Path("table")) -> DataSettings:
    """Settings that have only what `overrides` say of a table's columns or a folder's levels; see `inspect`."""
    return _with(overrides, path, DataSettings(dataset="arrays"))


def _with(overrides: Sequence[str], path: Path, data: DataSettings) -> DataSettings:
    """The settings with the user's own; UserError for one that the inspection does not read."""
    if not overrides:
        return data
    for text in overrides:
        full_key, _ = parse_override(text)
        key = ".".join(full_key.split(".")[:2])
        if key not in SETTINGS:
            *others, last = SETTINGS
            raise UserError(f"--set {text}: an inspection reads only {', '.join(others)} and {last}")
        if key == "data.columns" and path.is_dir():
            raise UserError(f"--set {text}: {path} is a folder, which has no columns")
    usual = Experiment(data=data)
    return parse_experiment(usual.toml(), overrides).data


def _other_form(path: Path) -> str:
    """The form of a folder that is not DOMAIN/CLASS/IMAGE but another one that fedsim reads; else an empty string."""
    for name in ("dataset_info.json", "dataset_dict.json"):  # of `save_to_disk`
        if (path / name).is_file():
            return "hugging-face"
    domains = subfolders(path) if path.is_dir() else []
    masks = [_has_masks(path / name) for name in domains]
    return "masks" if masks and all(masks) else ""


def _has_masks(folder: Path) -> bool:
    """Whether a folder looks like a domain whose images have masks."""
    if (folder / "samples.csv").is_file():
        return True
    return {"image", "mask"} <= set(subfolders(folder))


def _check(file: Path, domain: str, label: int) -> Found:
    try:
        content = read_bytes(file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, of images that are decoded all the same
            _, _, measures = decode_measured(file, SMALL, content)
            with Image.open(io.BytesIO(content)) as image:
                return Found(
                    file,
                    domain,
                    label,
                    size=image.size,
                    mode=image.mode,
                    digest=digest(content),
                    treated=treatment(image),
                    measures=measures,
                )
    except UserError as error:
        is_missing = isinstance(error, MissingImageError)
        return Found(file, domain, label, problem=str(error), is_missing=is_missing)


def treatment(image: Image.Image) -> tuple[str, ...]:
    """What decoding does with an opened image, in the words of the inspection; nothing for upright RGB or grey."""
    treated = []
    orientation = image.getexif().get(ORIENTATION, 1)
    if orientation in range(2, 9):
        treated.append("turned (EXIF)")
    if image.has_transparency_data:
        treated.append("transparent on white")
    elif image.mode.startswith(("I", "F")):
        treated.append("scaled to 8 bits")
    elif image.mode not in ("RGB", "L", "1"):
        form = "palette" if image.mode == "P" else image.mode
        treated.append(f"{form} to RGB")
    if getattr(image, "n_frames", 1) > 1:
        treated.append("first frame only")
    return tuple(treated)


def _summary(domain: str, listing: Listing, checked: list[Found]) -> dict[str, str | int]:
    """The row of a domain in the table of image sizes and modes."""
    widths, heights = set(), set()
    modes: Counter[str] = Counter()
    treated: Counter[str] = Counter()
    for file in checked:
        if file.problem:
            continue
        width, height = file.size
        widths.add(width)
        heights.add(height)
        modes[file.mode] += 1
        treated.update(file.treated)
    converted = ", ".join(f"{count} {what}" for what, count in treated.most_common())
    return {
        "domain": domain,
        "images": len(listing.files),
        "read": len(checked),
        "width": _span(widths),
        "height": _span(heights),
        "modes": ", ".join(f"{mode} {count}" for mode, count in modes.most_common()),
        "converted": converted or "-",
    }


def _span(sides: Collection[int]) -> str:
    """The least and the largest of some sides in pixels, in words: '16-64', '16' or '-'."""
    if not sides:
        return "-"
    ends = sorted({min(sides), max(sides)})
    return "-".join(map(str, ends))


def _listed(problems: list[str], where: str) -> list[str]:
    """The first problems, and how many more there are."""
    listed = problems[:SHOWN]
    more = len(problems) - SHOWN
    if more > 0:
        listed.append(f"and {more} more such files {where}")
    return listed


def _loose(path: Path) -> list[str]:
    """A line for each image of a folder that is not in a class folder."""
    if not path.is_dir():
        return []
    lines = []
    for name in ("", *subfolders(path)):
        for file in sorted((path / name).iterdir()):
            if file.is_file() and file.suffix.lower() in IMAGE_SUFFIXES:
                lines.append(f"{file} is in no class folder and is not read")
    return _listed(lines, "next to class folders")


def _doubles(files: list[Found], classes: tuple[str, ...]) -> list[str]:
    """Lines on files with equal bytes in two classes or two domains, and the number of other duplicates."""
    groups: dict[bytes, list[Found]] = {}
    for file in files:
        groups.setdefault(file.digest, []).append(file)
    of_classes: list[str] = []
    of_domains: list[str] = []
    others = 0
    for group in groups.values():
        labels = {file.label for file in group}
        domains = {file.domain for file in group}
        if len(labels) > 1:
            first, *_, last = sorted(group, key=lambda file: file.label)
            names = f"{classes[first.label]} and {classes[last.label]}"
            of_classes.append(f"{first.file} and {last.file} are the same image in two classes, {names}")
        elif len(domains) > 1:
            of_domains.append(f"{group[0].file} and {group[-1].file} are the same image in two domains")
        else:
            others += len(group) - 1
    lines = _listed(of_classes, "in two classes")
    lines += _listed(of_domains, "in two domains")
    if others:
        lines.append(f"{others} images occur more than once in their domain and class")
    return lines


def draw_grid(found: Inspection, file: Path, columns: int = 10) -> Path:
    """PNG with a row of images per domain and a column per class (the first ones); cells without image stay empty."""
    from matplotlib.figure import Figure

    classes = list(found.counts.columns[:columns])
    domains = list(found.counts.index)
    width = 1.1 * len(classes) + 1.4
    height = 1.15 * len(domains) + 0.5
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(len(domains), len(classes), squeeze=False)
    for row, domain in enumerate(domains):
        for column, name in enumerate(classes):
            cell = axes[row][column]
            cell.set(xticks=[], yticks=[])
            if (domain, name) in found.examples:
                image = decode(found.examples[domain, name], CELL)
                cell.imshow(image.transpose(1, 2, 0))
            if row == 0:
                cell.set_title(name.replace("$", r"\$"), fontsize=8)
            if column == 0:
                cell.set_ylabel(domain.replace("$", r"\$"), fontsize=8)
    write_figure(figure, file, dpi=120)
    return file
