"""Images with a mask each: domain/image/NAME and domain/mask/NAME, or a table domain/samples.csv that names both.

A mask file is one grey or palette image, whose values `data.structures` explains. The fundus layout has disc = [0, 128]
and cup = [0], so that the cup lies within the disc. A mask of class indices has one value per structure.
"""

import csv
import functools
import hashlib
import io
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from fedsim.common.errors import UserError
from fedsim.data.cache import Entry, Planes, rows_of
from fedsim.data.cached_digests import kept
from fedsim.data.findings import Finding, joined_names
from fedsim.data.folders import Listing, images_of
from fedsim.data.image_tree import ImageTree
from fedsim.data.lists import text_of
from fedsim.data.names import composed, names_in, read_from, refuse_alike, same, subfolders
from fedsim.data.pixels import Size, read_bytes, refusals, unreadable
from fedsim.data.reader import content_hash
from fedsim.data.row import Benchmark
from fedsim.settings import DataSettings, cache_root, data_root

Structures = Mapping[str, Sequence[int]]  # the values of masks that mean each structure
Pairs = list[tuple[str, str]]  # the paths of an image and of its mask, seen from the folder of the domain
TABLE = "samples.csv"
LOSSY = {"JPEG", "MPO"}  # Pillow's names of formats that do not keep values
SHOWN_VALUES = 12
SINGLE_PLANE = {"1", "L", "P", "I;16", "I;16B", "I"}  # modes of which every pixel is one number
MOST_VALUES = 1000  # that a domain's tally has, the ones with the most pixels
COUNTED = 65536  # values up to here are counted without sorting
LISTED_VALUES = 6  # in a finding
INTERPOLATED = 8  # more unnamed values than these look like a resized mask
Tally = Mapping[str, Sequence[int]]  # {value as text: (masks that have it, pixels)}; JSON has no other keys


def discover(data: DataSettings, row: Benchmark) -> Benchmark:
    """The row with the structures of the settings, and the domains on disk or of the settings."""
    if not data.structures:
        raise UserError("data.structures is empty: name each structure and its values, e.g. disc = [0, 128]")
    empty = [name for name, values in data.structures.items() if not values]
    if empty:
        raise UserError(f"data.structures.{empty[0]} has no values; name the pixel values that mean it")
    root = data_root(data)
    if not root.is_dir() and not data.domains:
        raise UserError(f"no folder {root}{read_from(root)}; set data.root or $FEDSIM_DATA to where the domains are")
    on_disk = names_in(root) if root.is_dir() else []
    asked = map(composed, data.domains)
    domains = tuple(sorted({*on_disk, *asked}))
    if not domains:
        raise UserError(f"no domain folders in {root}: expected domain/image and domain/mask below it; set data.root")
    if not data.domains:
        refuse_alike([[name] for name in domains], "domains", root)
    return replace(row, domains=domains, structures=tuple(data.structures))


class MaskFolders(ImageTree):
    """Reads images and their masks through the cache."""

    def __init__(self, data: DataSettings, bench: Benchmark) -> None:
        super().__init__(data, bench)
        self._masks: dict[str, list[bytes]] = {}  # hashes of the mask files by domain

    def find(self) -> None:
        """Every domain must have its folder."""
        for domain in self.found.domains:
            self._folder(domain)

    def listing(self, domain: str) -> Listing:
        """Image files of a domain, all of one stratum."""
        images = [image for image, _ in self._pairs(domain)]
        return _of_one_stratum(self._folder(domain), images)

    def masks(self, domain: str, apart: bool = False) -> np.ndarray:
        """Masks uint8 [N,Q,s,s] of 0 and 1, decoded on first use (read-only memory map)."""
        entry = self._mask_entry(domain)
        masks, _, sizes = entry.arrays()
        _check_sizes(entry.listing, self.sizes(domain), sizes)
        _check_structures(entry.listing, domain, masks, self.data.structures)
        return masks

    def file_findings(self) -> list[Finding]:
        """What images lose when they are decoded, and values of masks that no structure names."""
        tallies = {domain: self._mask_entry(domain).seen() for domain in self.found.domains}
        of_images = super().file_findings()
        of_masks = mask_findings(tallies, self.data.structures)
        return [*of_images, *of_masks]

    def _mask_entry(self, domain: str) -> Entry:
        """The place of a domain's masks in the cache."""
        masks = [mask for _, mask in self._pairs(domain)]
        structures = self.data.structures
        meaning = repr(sorted(structures.items())).encode()
        digest = hashlib.sha256(meaning).hexdigest()
        planes = Planes(
            len(structures),
            key=digest[:16] + ",".join(structures),
            decode=functools.partial(decode_mask, structures=structures),
            tally=value_tally,
        )
        return Entry(
            _of_one_stratum(self._folder(domain), masks),
            dataset=self.found.name,
            domain=f"{domain}-masks",
            side=self.data.image_size,
            cache=cache_root(self.data),
            planes=planes,
        )

    def fingerprint(self, domain: str) -> str:
        """Hash of the images, the masks and what their values mean."""
        images = super().fingerprint(domain).encode()
        masks = b"".join(self._mask_hashes(domain))
        meaning = repr(list(self.data.structures.items())).encode()
        return content_hash(images, masks, meaning)

    def nameless(self, domain: str) -> str:
        """Hash of the images and of the masks; the same images may have other masks in another domain."""
        images = super().nameless(domain)
        if not images:
            return ""
        masks = sorted(self._mask_hashes(domain))
        return content_hash(images.encode(), *masks)

    def _mask_hashes(self, domain: str) -> list[bytes]:
        if domain not in self._masks:
            entry = self._mask_entry(domain)
            paths = entry.listing.paths

            def read() -> np.ndarray:
                hashes = [hashlib.sha256(read_bytes(path)).digest() for path in paths]
                return rows_of(hashes)

            rows = kept(entry, "sha256.npy", (len(paths), 32), read)
            self._masks[domain] = [row.tobytes() for row in rows]
        return self._masks[domain]

    def _folder(self, domain: str) -> Path:
        root = data_root(self.data)
        folders = subfolders(root) if root.is_dir() else []
        name = same(domain, folders)
        if name is None:
            present = ", ".join(folders) or "none"
            raise UserError(f"domain {domain!r} has no folder in {root} (found: {present})")
        return root / name

    def _pairs(self, domain: str) -> Pairs:
        folder = self._folder(domain)
        table = folder / TABLE
        pairs = self._of_table(table) if table.is_file() else _of_folders(folder)
        if not pairs:
            raise UserError(f"{folder}: no images; expected image/NAME and mask/NAME, or {TABLE}")
        return pairs

    def _of_table(self, file: Path) -> Pairs:
        """The pairs of a table, none of which may lie in the folder of another domain."""
        pairs = _of_table(file)
        folder = Path(os.path.normpath(file.parent.absolute()))
        domains = self.found.all_domains or self.found.domains
        others = {folder.with_name(name) for name in domains} - {folder}
        for path in itertools.chain(*pairs):
            if ".." not in path and not path.startswith("/"):
                continue  # it lies below the folder
            place = Path(os.path.normpath(folder / path))
            if others.intersection(place.parents):
                raise UserError(f"{file}: {path!r} lies in the folder of another domain, whose image it is; remove it")
        return pairs


def _of_one_stratum(folder: Path, files: Sequence[str]) -> Listing:
    """The files of a domain below a folder, which no class tells apart."""
    labels = np.zeros(len(files), np.int64)
    return Listing(folder, tuple(files), labels)


def _check_sizes(listing: Listing, image_sizes: np.ndarray, mask_sizes: np.ndarray) -> None:
    """UserError for a mask of another size than its image; sizes [N,2] are heights and widths."""
    others = np.flatnonzero((image_sizes != mask_sizes).any(axis=1))
    if not len(others):
        return
    first = others[0]
    file = listing.folder / listing.files[first]
    height, width = mask_sizes[first]
    rows, columns = image_sizes[first]
    raise UserError(f"{file} has {width} x {height} pixels and its image {columns} x {rows}; give both the same size")


def _check_structures(
    listing: Listing,
    domain: str,
    masks: np.ndarray,
    structures: Structures,
) -> None:
    """UserError for a structure without a pixel in a whole domain, whose masks then probably have other values."""
    for number, (name, named) in enumerate(structures.items()):
        is_present = any(mask[number].any() for mask in masks)
        if is_present:
            continue
        values = _values_in(listing)
        if set(named) & set(values):
            raise UserError(
                f"{domain}: no pixel of the structure {name!r} is left at data.image_size = {masks.shape[-1]}; raise it"
            )
        shown = ", ".join(map(str, values[:SHOWN_VALUES]))
        if len(values) > SHOWN_VALUES:
            shown += ", ..."
        raise UserError(
            f"{domain}: no mask has a pixel of the structure {name!r}, whose values are {named}; the masks have the "
            f"values {shown}; correct data.structures or the masks, or leave the domain out by data.domains"
        )


def _values_in(listing: Listing) -> list[int]:
    """All values that pixels of the mask files have, sorted."""
    present: set[int] = set()
    for file in listing.paths:
        values = _values(file, read_bytes(file))
        present.update(np.unique(values).tolist())
    return sorted(present)


def _of_folders(folder: Path) -> Pairs:
    """(image, mask) of equal names without their endings, sorted; UserError for one without the other."""
    images = _by_name(folder, "image")
    masks = _by_name(folder, "mask")
    alone = images.keys() ^ masks.keys()
    if alone:
        first = min(alone)
        has, lacks = ("image", "mask") if first in images else ("mask", "image")
        raise UserError(f"{folder}: {first!r} has a file in {has}/ and none in {lacks}/; every image needs its mask")
    return [(images[name], masks[name]) for name in sorted(images)]


def _by_name(folder: Path, part: str) -> dict[str, str]:
    """{name below the part, without ending: path seen from `folder`} of the image files in and below a folder."""
    if not (folder / part).is_dir():
        raise UserError(f"{folder}: no folder {part!r}; expected image/NAME and mask/NAME, or {TABLE}")
    files: dict[str, str] = {}
    for file in images_of(folder, part):
        below = Path(file).relative_to(part)
        name = str(below.with_suffix(""))
        if name in files:
            raise UserError(f"{folder / part}: two files are called {name!r}; rename one of them")
        files[name] = file
    return files


def _of_table(file: Path) -> Pairs:
    """(image, mask) of a table's rows, sorted; paths are seen from its folder."""
    lines = io.StringIO(text_of(file), newline="")
    try:
        rows = list(csv.DictReader(lines))
    except csv.Error as error:
        raise UserError(f"cannot read the table {file} ({error}); correct it") from None
    columns = set(rows[0] if rows else ())
    missing = sorted({"image", "mask"} - columns)
    if missing:
        raise UserError(f"{file}: no column {missing[0]!r}, or no rows; it needs the columns image and mask")
    pairs = [(row["image"] or "", row["mask"] or "") for row in rows]
    pairs.sort()
    seen = set()
    for image, mask in pairs:
        if not image or not mask:
            raise UserError(f"{file}: a row has an empty cell ({image or mask!r}); every image needs its mask")
        path = os.path.normpath(image)
        if path in seen:
            raise UserError(f"{file}: {image!r} has more than one row; keep one")
        seen.add(path)
    return pairs


def decode_mask(
    path: Path,
    side: int,
    content: bytes,
    structures: Structures,
) -> tuple[np.ndarray, Size, dict[int, int]]:
    """One mask file as planes uint8 [Q,s,s] of 0 and 1, its height and width, and its pixels by value.

    A plane marks the pixels whose value a structure names, resized to the nearest.

    Turned as its EXIF says, like its image. UserError for a file of colours or in a format that changes values.
    """
    values = _values(path, content)
    planes = []
    for named in structures.values():
        marked = np.isin(values, named).astype(np.uint8)
        plane = Image.fromarray(marked)
        resized = plane.resize((side, side), Image.Resampling.NEAREST)
        planes.append(np.asarray(resized))
    return np.stack(planes), values.shape, value_counts(values)


def _values(path: Path, content: bytes) -> np.ndarray:
    """The numbers of a mask file, int64 [height, width]; a pixel of a file of one bit is 0 or 1."""
    with refusals(path), Image.open(io.BytesIO(content)) as image:
        if image.mode not in SINGLE_PLANE:
            raise unreadable(path, f"colour mode {image.mode}; a mask has one number per pixel, grey or palette")
        is_jpeg = image.info.get("compression") == "jpeg"
        if image.format in LOSSY or is_jpeg:
            raise unreadable(path, "a JPEG changes the values of pixels; draw or convert the mask again, as PNG")
        upright = ImageOps.exif_transpose(image)
        return np.asarray(upright).astype(np.int64)


# ------------------------------------------------------------------------------ values of masks that no structure names


def value_counts(values: np.ndarray) -> dict[int, int]:
    """{value: pixels} of one mask, int64 [height, width]."""
    if values.size and values.min() >= 0 and values.max() < COUNTED:
        of_all = np.bincount(values.ravel())
        present = np.flatnonzero(of_all)
        counts = of_all[present]
    else:
        present, counts = np.unique(values, return_counts=True)
    return dict(zip(present.tolist(), counts.tolist()))


def value_tally(counted: Iterable[Mapping[int, int]]) -> dict[str, list[int]]:
    """{value: [masks that have it, pixels]} over the masks of a domain, of the values with the most pixels."""
    masks: Counter[int] = Counter()
    pixels: Counter[int] = Counter()
    for counts in counted:
        masks.update(counts.keys())
        pixels.update(counts)
    tally = {}
    for value, count in pixels.most_common(MOST_VALUES):
        tally[str(value)] = [masks[value], count]
    return tally


def mask_findings(tallies: Mapping[str, Tally], structures: Structures) -> list[Finding]:
    """A grave finding for each domain whose masks have values that neither a structure names nor are the background.

    The background is the one unnamed value that most pixels of all domains have.
    """
    named = set(itertools.chain.from_iterable(structures.values()))
    unnamed = {domain: _unnamed_values(tally, named) for domain, tally in tallies.items()}
    pixels: Counter[int] = Counter()
    for of_domain in unnamed.values():
        for value, (_, count) in of_domain.items():
            pixels[value] += count
    if len(pixels) < 2:
        return []
    [(background, _)] = pixels.most_common(1)
    findings = []
    for domain, of_domain in unnamed.items():
        others = {value: counts for value, counts in of_domain.items() if value != background}
        if not others:
            continue
        is_everywhere = all(others.keys() <= values.keys() for values in unnamed.values())
        findings.append(_finding(domain, others, background, is_everywhere))
    return findings


def _unnamed_values(tally: Tally, named: set[int]) -> dict[int, Sequence[int]]:
    """{value: (masks that have it, pixels)} of a domain's values that no structure names."""
    unnamed = {}
    for text, counts in tally.items():
        value = int(text)
        if value not in named:
            unnamed[value] = counts
    return unnamed


def _finding(
    domain: str,
    others: Mapping[int, Sequence[int]],
    background: int,
    is_everywhere: bool,
) -> Finding:
    """The finding for one domain; others: its values that nothing explains. is_everywhere: all domains have them"""
    masks = max(count for count, _ in others.values())
    pixels = sum(count for _, count in others.values())
    shown = joined_names([str(value) for value in sorted(others)], LISTED_VALUES)
    where = f"the masks of {domain} (of up to {masks:,} masks)"
    text = (
        f"{pixels:,} pixels of {where} have the values {shown}, which no structure names, and count as background, as "
        f"{background} does"
    )
    if len(others) > INTERPOLATED:
        remedy = "so many values come from resizing: resize the masks to the nearest pixel, without interpolation"
    elif is_everywhere:
        remedy = (
            "name them in data.structures; pixels that nothing should count cannot be left out, so leave out these "
            "images"
        )
    else:
        remedy = "other domains do not have them: name them in data.structures, or correct the masks"
    return Finding("mask-values", domain, masks, text, remedy, is_grave=True)
