"""Images with a mask each: domain/image/NAME and domain/mask/NAME, or a table domain/samples.csv that names both.

A mask file is one grey or palette image, whose values `data.structures` explains. The fundus layout has disc = [0, 128]
and cup = [0], so that the cup lies within the disc. A mask of class indices has one value per structure.
"""

import csv
import functools
import hashlib
import io
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from fedsim.common.errors import UserError
from fedsim.data.cache import Entry, Planes, rows_of
from fedsim.data.cached_digests import kept
from fedsim.data.findings import Finding
from fedsim.data.folders import Listing, images_of
from fedsim.data.image_tree import ImageTree
from fedsim.data.lists import text_of
from fedsim.data.mask_values import mask_findings, value_counts, value_tally
from fedsim.data.names import composed, names_in, read_from, refuse_alike, same, subfolders
from fedsim.data.pixels import read_bytes, refusals, unreadable
from fedsim.data.reader import content_hash
from fedsim.data.row import Benchmark
from fedsim.settings import DataSettings, cache_root, data_root

TABLE = "samples.csv"
LOSSY = {"JPEG", "MPO"}  # Pillow's names of formats that do not keep values
SHOWN_VALUES = 12
SINGLE_PLANE = {"1", "L", "P", "I;16", "I;16B", "I"}  # modes of which every pixel is one number


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
    domains = tuple(sorted({*on_disk, *map(composed, data.domains)}))
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
        pairs = self._pairs(domain)
        return Listing(self._folder(domain), tuple(image for image, _ in pairs), np.zeros(len(pairs), np.int64))

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
        return [*super().file_findings(), *mask_findings(tallies, self.data.structures)]

    def _mask_entry(self, domain: str) -> Entry:
        """The place of a domain's masks in the cache."""
        pairs, values = self._pairs(domain), self.data.structures
        listing = Listing(self._folder(domain), tuple(mask for _, mask in pairs), np.zeros(len(pairs), np.int64))
        key = hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()[:16] + ",".join(values)
        planes = Planes(len(values), key, functools.partial(decode_mask, structures=values), value_tally)
        name, side = f"{domain}-masks", self.data.image_size
        return Entry(listing, self.found.name, name, side, cache_root(self.data), planes)

    def fingerprint(self, domain: str) -> str:
        """Hash of the images, the masks and what their values mean."""
        meaning = repr(list(self.data.structures.items())).encode()
        return content_hash(super().fingerprint(domain).encode(), b"".join(self._mask_hashes(domain)), meaning)

    def nameless(self, domain: str) -> str:
        """Hash of the images and of the masks; the same images may have other masks in another domain."""
        images = super().nameless(domain)
        return content_hash(images.encode(), *sorted(self._mask_hashes(domain))) if images else ""

    def _mask_hashes(self, domain: str) -> list[bytes]:
        if domain not in self._masks:
            entry = self._mask_entry(domain)
            paths = entry.listing.paths

            def read() -> np.ndarray:
                return rows_of([hashlib.sha256(read_bytes(path)).digest() for path in paths])

            hashes = kept(entry, "sha256.npy", (len(paths), 32), read)
            self._masks[domain] = [row.tobytes() for row in hashes]
        return self._masks[domain]

    def _folder(self, domain: str) -> Path:
        root = data_root(self.data)
        folders = subfolders(root) if root.is_dir() else []
        name = same(domain, folders)
        if name is None:
            raise UserError(f"domain {domain!r} has no folder in {root} (found: {', '.join(folders) or 'none'})")
        return root / name

    def _pairs(self, domain: str) -> list[tuple[str, str]]:
        folder = self._folder(domain)
        pairs = self._of_table(folder / TABLE) if (folder / TABLE).is_file() else _of_folders(folder)
        if not pairs:
            raise UserError(f"{folder}: no images; expected image/NAME and mask/NAME, or {TABLE}")
        return pairs

    def _of_table(self, file: Path) -> list[tuple[str, str]]:
        """The pairs of a table, none of which may lie in the folder of another domain."""
        pairs, folder = _of_table(file), Path(os.path.normpath(file.parent.absolute()))
        others = {folder.with_name(name) for name in (self.found.all_domains or self.found.domains)} - {folder}
        for path in (path for pair in pairs for path in pair if ".." in path or path.startswith("/")):
            if others & set(Path(os.path.normpath(folder / path)).parents):
                raise UserError(f"{file}: {path!r} lies in the folder of another domain, whose image it is; remove it")
        return pairs


def _check_sizes(listing: Listing, image_sizes: np.ndarray, mask_sizes: np.ndarray) -> None:
    """UserError for a mask of another size than its image; sizes [N,2] are heights and widths."""
    other = np.flatnonzero((image_sizes != mask_sizes).any(axis=1))
    if len(other):
        (height, width), (rows, columns) = mask_sizes[other[0]], image_sizes[other[0]]
        raise UserError(
            f"{listing.folder / listing.files[other[0]]} has {width} x {height} pixels and its image "
            f"{columns} x {rows}; give both the same size"
        )


def _check_structures(
    listing: Listing,
    domain: str,
    masks: np.ndarray,
    structures: dict[str, list[int]],
) -> None:
    """UserError for a structure without a pixel in a whole domain, whose masks then probably have other values."""
    for number, (name, named) in enumerate(structures.items()):
        if any(mask[number].any() for mask in masks):
            continue
        values = sorted({int(value) for file in listing.paths for value in np.unique(_values(file, read_bytes(file)))})
        shown = ", ".join(map(str, values[:SHOWN_VALUES])) + (", ..." if len(values) > SHOWN_VALUES else "")
        if set(named) & set(values):
            raise UserError(
                f"{domain}: no pixel of the structure {name!r} is left at data.image_size = {masks.shape[-1]}; raise it"
            )
        raise UserError(
            f"{domain}: no mask has a pixel of the structure {name!r}, whose values are {named}; the masks have the "
            f"values {shown}; correct data.structures or the masks, or leave the domain out by data.domains"
        )


def _of_folders(folder: Path) -> list[tuple[str, str]]:
    """(image, mask) of equal names without their endings, sorted; UserError for one without the other."""
    images, masks = (_by_name(folder, part) for part in ("image", "mask"))
    alone = sorted(images.keys() ^ masks.keys())
    if alone:
        has, lacks = ("image", "mask") if alone[0] in images else ("mask", "image")
        raise UserError(f"{folder}: {alone[0]!r} has a file in {has}/ and none in {lacks}/; every image needs its mask")
    return [(images[name], masks[name]) for name in sorted(images)]


def _by_name(folder: Path, part: str) -> dict[str, str]:
    """{name below the part, without ending: path seen from `folder`} of the image files in and below a folder."""
    if not (folder / part).is_dir():
        raise UserError(f"{folder}: no folder {part!r}; expected image/NAME and mask/NAME, or {TABLE}")
    masks_by_name: dict[str, str] = {}
    for file in images_of(folder, part):
        name = str(Path(file).relative_to(part).with_suffix(""))
        if name in masks_by_name:
            raise UserError(f"{folder / part}: two files are called {name!r}; rename one of them")
        masks_by_name[name] = file
    return masks_by_name


def _of_table(file: Path) -> list[tuple[str, str]]:
    """(image, mask) of a table's rows, sorted; paths are seen from its folder."""
    try:
        rows = list(csv.DictReader(io.StringIO(text_of(file), newline="")))
    except csv.Error as error:
        raise UserError(f"cannot read the table {file} ({error}); correct it") from None
    missing = sorted({"image", "mask"} - set(rows[0] if rows else {}))
    if missing:
        raise UserError(f"{file}: no column {missing[0]!r}, or no rows; it needs the columns image and mask")
    pairs = sorted((row["image"] or "", row["mask"] or "") for row in rows)
    seen = set()
    for pair in pairs:
        if not all(pair):
            raise UserError(f"{file}: a row has an empty cell ({pair[0] or pair[1]!r}); every image needs its mask")
        image = os.path.normpath(pair[0])
        if image in seen:
            raise UserError(f"{file}: {pair[0]!r} has more than one row; keep one")
        seen.add(image)
    return pairs


def decode_mask(
    path: Path,
    side: int,
    content: bytes,
    structures: dict[str, list[int]],
) -> tuple[np.ndarray, tuple[int, int], dict[int, int]]:
    """One mask file as planes uint8 [Q,s,s] of 0 and 1, its height and width, and its pixels by value.

    A plane marks the pixels whose value a structure names, resized to the nearest.

    Turned as its EXIF says, like its image. UserError for a file of colours or in a format that changes values.
    """
    values = _values(path, content)
    planes = [np.isin(values, named).astype(np.uint8) for named in structures.values()]
    resized = [Image.fromarray(plane).resize((side, side), Image.Resampling.NEAREST) for plane in planes]
    return np.stack([np.asarray(plane) for plane in resized]), values.shape, value_counts(values)


def _values(path: Path, content: bytes) -> np.ndarray:
    """The numbers of a mask file, int64 [height, width]; a pixel of a file of one bit is 0 or 1."""
    with refusals(path), Image.open(io.BytesIO(content)) as image:
        if image.mode not in SINGLE_PLANE:
            raise unreadable(path, f"colour mode {image.mode}; a mask has one number per pixel, grey or palette")
        if image.format in LOSSY or image.info.get("compression") == "jpeg":
            raise unreadable(path, "a JPEG changes the values of pixels; draw or convert the mask again, as PNG")
        return np.asarray(ImageOps.exif_transpose(image)).astype(np.int64)
