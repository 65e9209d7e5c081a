"""Drawings: the same things drawn in five real styles of emojis, embedded at 32 pixels (no download)."""

import csv
from functools import lru_cache
from pathlib import Path

import numpy as np

from fedsim.common.errors import UserError
from fedsim.common.files import of_home
from fedsim.data.digits import resize
from fedsim.data.reader import Images, Reader, content_hash
from fedsim.data.splits import seed_hash, stratified_split

EMBEDDED = Path(__file__).with_name("embedded") / "drawings"
SIDE = 32  # pixels of an embedded image
COLUMNS = 30  # images in a line of a sheet
APART = 0.25  # the share of the emojis of each class that no client has in any style
STYLES = ("fluent_3d", "noto", "openmoji", "openmoji_black", "twemoji")
# Unicode's subgroups of each class, without numbers and words that may follow.
SUBGROUPS = {
    "animal": ("animal-mammal", "animal-bird", "animal-marine", "animal-bug", "animal-reptile", "animal-amphibian"),
    "clock": ("time",),
    "face": (
        "cat-face", "face-affection", "face-concerned", "face-costume", "face-glasses", "face-hand", "face-hat",
        "face-negative", "face-neutral-skeptical", "face-sleepy", "face-smiling", "face-tongue", "face-unwell",
        "monkey-face",
    ),
    "food": ("food-asian", "food-fruit", "food-prepared", "food-sweet", "food-vegetable"),
    "hand": (
        "hand-fingers-closed", "hand-fingers-open", "hand-fingers-partial", "hand-prop", "hand-single-finger", "hands",
    ),
    "person": (
        "person", "person-activity", "person-fantasy", "person-gesture", "person-resting", "person-role",
        "person-sport", "person-symbol",
    ),
    "vehicle": ("transport-air", "transport-ground", "transport-water"),
}  # fmt: skip
CLASSES = tuple(SUBGROUPS)


def class_of(subgroup: str) -> str:
    """The class of an emoji of this subgroup; empty where it has none."""
    names = [name for name, subgroups in SUBGROUPS.items() if subgroup in subgroups]
    return names[0] if names else ""


@lru_cache(maxsize=2)
def listed(folder: Path) -> tuple[list[dict[str, str]], np.ndarray]:
    """The lines of a folder's emoji.csv that have a class, and their labels int64 [N]."""
    try:
        with (folder / "emoji.csv").open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if class_of(row["subgroup"])]
    except (OSError, KeyError, UnicodeDecodeError):
        raise UserError(
            f"{folder}: no emoji.csv with the columns name, group and subgroup; data.root names the folder that "
            "docs/make_drawings.py wrote, and without it the embedded images are used"
        ) from None
    labels = [CLASSES.index(class_of(row["subgroup"])) for row in rows]
    return rows, np.array(labels, np.int64)


@lru_cache(maxsize=len(STYLES))
def sheet_images(style: str) -> np.ndarray:
    """The embedded images of a style in the order of the list: uint8 [N,3,32,32]."""
    from PIL import Image

    file = Image.open(EMBEDDED / f"{style}.webp")
    sheet = np.asarray(file.convert("RGB"))
    lines = len(sheet) // SIDE
    tiles = sheet.reshape(lines, SIDE, COLUMNS, SIDE, 3)
    images = tiles.transpose(0, 2, 4, 1, 3).reshape(-1, 3, SIDE, SIDE)
    rows, _ = listed(EMBEDDED)
    return np.ascontiguousarray(images[: len(rows)])


def file_of(folder: Path, style: str, row: dict[str, str]) -> Path:
    """The file of an emoji in one style, in the folder of the full set."""
    return folder / style / row["group"] / f"{row['name']}.png"


@lru_cache(maxsize=len(STYLES))
def file_images(folder: Path, style: str, side: int) -> np.ndarray:
    """The images of a style from the files of the full set: uint8 [N,3,side,side]. UserError names a bad file."""
    from fedsim.data.pixels import decode_sized

    rows, _ = listed(folder)
    images = []
    for row in rows:
        image, _ = decode_sized(file_of(folder, style, row), side)
        images.append(image)
    return np.stack(images)


class Drawings(Reader):
    """Reads the drawings: the embedded ones, or those of the full set in the folder `data.root`.

    Every domain is a style and has the same emojis. A quarter of them, drawn by the seed of splits, is held by no
    client in any style: the unseen style is tested on these.
    """

    @property
    def folder(self) -> Path:
        """The folder with the list and the images."""
        return of_home(self.data.root) if self.data.root else EMBEDDED

    def find(self) -> None:
        """Raise UserError when the full set is asked for and is not there."""
        listed(self.folder)

    def chosen(self, apart: bool) -> np.ndarray:
        """Indices of the emojis that clients hold, or of those that none holds."""
        _, labels = listed(self.folder)
        seed = seed_hash(self.data.seed_of_splits, "drawings")
        of_clients, of_none = stratified_split(labels, APART, seed)
        return np.sort(of_none if apart else of_clients)

    def images(self, domain: str, apart: bool = False) -> Images:
        """Images uint8 [N,3,s,s] and labels int64 [N] of a style."""
        side = self.data.image_size
        images = file_images(self.folder, domain, side) if self.data.root else sheet_images(domain)
        _, labels = listed(self.folder)
        chosen = self.chosen(apart)
        return resize(images[chosen], side), labels[chosen]

    def labels(self, domain: str) -> np.ndarray:
        """Labels int64 [N] of the emojis that clients hold."""
        _, labels = listed(self.folder)
        return labels[self.chosen(apart=False)]

    def fingerprint(self, domain: str) -> str:
        """Hash of a style's images and of the list."""
        rows, _ = listed(self.folder)
        files = [self.folder / "emoji.csv"]
        if self.data.root:
            files += [file_of(self.folder, domain, row) for row in rows]
        else:
            files.append(EMBEDDED / f"{domain}.webp")
        return content_hash(*(file.read_bytes() for file in files))
