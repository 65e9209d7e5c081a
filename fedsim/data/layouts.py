"""Data sets that are not published as a plain tree domain/class/image: where their files, labels and domains are."""

import functools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import pandas as pd

from fedsim.common.errors import UserError
from fedsim.data.findings import Finding
from fedsim.data.folders import Listing, dataset_folder, is_image, places, walk
from fedsim.data.image_tree import ImageTree
from fedsim.data.names import matching, names_in, plain, read_from, subfolders
from fedsim.data.reader import Reader, numbers_of_groups, with_repeats
from fedsim.data.row import Benchmark
from fedsim.settings import DataSettings, data_root


class ImageRow(NamedTuple):
    """One image: its path below the data set's folder, class index, published part and patient ("" for none)."""

    path: str
    label: int
    part: str = ""
    patient: str = ""


def classes_on_disk(data: DataSettings, bench: Benchmark) -> Benchmark:
    """The row with its classes read from the class folders of its domains; UserError for another number of them.

    DomainNet and its parts have many names, which are equal in every copy.
    """
    for folder in places(data, bench):
        folders = subfolders(folder)
        matches = [matching(domain, folders) for domain in bench.domains]
        present = [name for name in matches if name]
        if present:
            break
    else:
        root = data_root(data)
        domains = ", ".join(bench.domains)
        raise UserError(
            f"{bench.title}: no domain folder ({domains}) in {root}{read_from(root)}; set data.root or $FEDSIM_DATA"
        )
    classes: set[str] = set()
    for name in present:
        classes.update(names_in(folder / name))
    expected = len(bench.classes)
    if len(classes) != expected:
        raise UserError(
            f"{bench.title}: {len(classes)} class folders in {folder}, and the data set has {expected}; "
            "use data.dataset = 'folder' for a part of it"
        )
    return replace(bench, classes=tuple(sorted(classes)))


class PublishedRows(ImageTree):
    """Reads the rows that `rows(domain)` gives, sorted by class and path, with their published parts."""

    takes_lists = False
    root: ClassVar[str] = ""  # a file or folder that tells the data set's folder

    def folder(self) -> Path:
        """Where the data set lies: the data root, or a folder below it called as the data set."""
        bench = self.found
        for folder in places(self.data, bench):
            if (folder / self.root).exists():
                return folder
        root = data_root(self.data)
        raise UserError(
            f"{bench.title}: no {self.root!r} in {root} or in a folder {bench.folder[0]!r} below it"
            f"{read_from(root)}; set data.root or $FEDSIM_DATA to where the data set is"
        )

    def find(self) -> None:
        """The data set's folder must be there."""
        self.folder()

    def rows(self, domain: str) -> Iterator[ImageRow]:
        """All images of a domain."""
        raise NotImplementedError

    def listing(self, domain: str) -> Listing:
        """Files and labels of a domain; UserError when there are none."""
        rows = self._sorted(domain)
        files = tuple(row.path for row in rows)
        labels = np.array([row.label for row in rows], np.int64)
        return Listing(self.folder(), files, labels)

    def listed(self, domain: str, part: str) -> np.ndarray | None:
        """Indices of the images of a published part."""
        parts = np.array([row.part for row in self._sorted(domain)])
        chosen = np.flatnonzero(parts == part)
        return chosen if len(chosen) else None

    def groups(self, domain: str) -> np.ndarray | None:
        """With data.group = "patient" the numbers int64 [N] of the patients, where the data set names them."""
        if self.data.group == "patient":
            patients = [row.patient for row in self._sorted(domain)]
            if all(patients):
                return numbers_of_groups(patients)
        return Reader.groups(self, domain)

    def findings(self) -> list[Finding]:
        """A finding where images have patients, any of these has two images, and they are split by image."""
        if self.data.group:
            return []
        patients: set[str] = set()
        for domain in self.found.domains:
            patients |= with_repeats(row.patient for row in self.rows(domain))
        if not patients:
            return []
        text = (
            f"the images are of {len(patients):,} patients and are drawn one by one, so that a patient trains and "
            "validates"
        )
        remedy = "data.group = 'patient' keeps a patient's images together"
        return [Finding("groups", self.found.title, len(patients), text, remedy)]

    def _lists(self, domain: str) -> list[bytes]:
        parts = [row.part for row in self._sorted(domain)]
        return ["\0".join(parts).encode()]

    def unlisted(self, domain: str, part: str) -> str:
        """The data set is published without that part."""
        return f"{self.found.title} has no published {part} part of {domain!r}; choose another data.split or test_split"

    def _sorted(self, domain: str) -> list[ImageRow]:
        rows = sorted(self.rows(domain), key=lambda row: (row.label, row.path))
        title = self.found.title
        if not rows:
            raise UserError(f"{title}: no image of domain {domain!r} in {self.folder()}")
        expected = self.found.counts[domain] if self.found.counts else 1
        if len(rows) < expected:
            present = f"{len(rows):,} of {expected:,} images"
            raise UserError(f"{title} {domain} is incomplete in {self.folder()}: {present}; copy the data set again")
        return rows

    def below(self, folder: Path, label: int, part: str = "") -> Iterator[ImageRow]:
        """The image files in and below a folder."""
        root = self.folder()
        for parent, names in walk(folder):
            for name in names:
                if is_image(name):
                    path = os.path.relpath(Path(parent, name), root)
                    yield ImageRow(path, label, part)


class DigitsDG(PublishedRows):
    """Digits-DG's archive: DOMAIN/{train,val}/CLASS/IMAGE (Zhou et al., AAAI 2020); the parts are published."""

    root = "mnist"

    def rows(self, domain: str) -> Iterator[ImageRow]:
        """Training and validation images of a domain; folders of other names than the classes' are left out."""
        for name, part in (("train", "train"), ("val", "validation")):
            folder = self.folder() / domain / name
            if not folder.is_dir():
                raise UserError(f"{self.found.title}: no folder {folder}; unpack the archive again")
            for sub in subfolders(folder):
                name_of_class = matching(sub, self.found.classes)
                if name_of_class is None:
                    continue
                label = self.found.classes.index(name_of_class)
                yield from self.below(folder / sub, label, part)

    def _lists(self, domain: str) -> list[bytes]:
        return []  # the path of a file says its part


class VLCS(PublishedRows):
    """DomainBed's folders of VLCS, or its other distribution DOMAIN/{train,crossval,test,full}/CLASS/IMAGE.

    There the domains are CALTECH, LABELME, SUN and PASCAL, and the classes may be the numbers 0 to 4 in the order of
    their names. `full` repeats images of other parts: train, crossval and test are read, which are all images. They
    are the published parts.
    """

    takes_lists = True
    folders: ClassVar[dict[str, str]] = {
        "Caltech101": "CALTECH",
        "LabelMe": "LABELME",
        "SUN09": "SUN",
        "VOC2007": "PASCAL",
    }
    parts: ClassVar[dict[str, str]] = {
        "train": "train",
        "crossval": "validation",
        "test": "test",
    }

    @functools.cached_property
    def _root_of_parts(self) -> Path | None:
        """The folder of the other distribution; None where it is not there."""
        if not data_root(self.data).is_dir():
            return None
        first = next(iter(self.folders.values()))
        for folder in places(self.data, self.found):
            name = matching(first, subfolders(folder))
            if name is None:
                continue
            if self.parts.keys() <= set(subfolders(folder / name)):
                return folder
        return None

    def folder(self) -> Path:
        """The folder of the domains."""
        return self._root_of_parts or dataset_folder(self.data, self.found)

    def listing(self, domain: str) -> Listing:
        """Files and labels of a domain, in whichever distribution is there."""
        if self._root_of_parts is None:
            return ImageTree.listing(self, domain)
        return super().listing(domain)

    def listed(self, domain: str, part: str) -> np.ndarray | None:
        """Indices of the images of a published part, or of those that a list names."""
        if self._root_of_parts is None:
            return ImageTree.listed(self, domain, part)
        return super().listed(domain, part)

    def groups(self, domain: str) -> np.ndarray | None:
        """The groups of an image tree; see `ImageTree.groups`."""
        return ImageTree.groups(self, domain)

    def findings(self) -> list[Finding]:
        """Nothing of the other distribution, whose folders are known; else those of an image tree."""
        return ImageTree.findings(self) if self._root_of_parts is None else []

    def _lists(self, domain: str) -> list[bytes]:
        return ImageTree._lists(self, domain) if self._root_of_parts is None else []

    def rows(self, domain: str) -> Iterator[ImageRow]:
        """The images of all parts of a domain; UserError for a folder that is none of the classes."""
        root = self.folder()
        name_of_domain = matching(self.folders[domain], subfolders(root))
        for sub, part in self.parts.items():
            folder = root / str(name_of_domain) / sub
            for name in subfolders(folder):
                label = self._label_of(folder, name)
                yield from self.below(folder / name, label, part)

    def _label_of(self, folder: Path, name: str) -> int:
        """The index of a class by its folder, which is called like it or has its number."""
        classes = self.found.classes
        numbers = list(map(str, range(len(classes))))
        if name in numbers:
            return numbers.index(name)
        class_name = matching(name, classes)
        if class_name is None:
            raise UserError(
                f"{self.found.title}: {folder / name} is none of the classes {', '.join(classes)}, which "
                "may be numbered from 0"
            )
        return classes.index(class_name)


class OfficeCaltechHome(PublishedRows):
    """CSAC's seven domains: Office-Caltech-10 and Office-Home side by side, and the eight classes that both have."""

    root = "amazon"
    names: ClassVar[dict[str, str]] = {"laptopcomputer": "laptop"}  # Office-Caltech-10 says it longer

    def rows(self, domain: str) -> Iterator[ImageRow]:
        """Images of a domain's folder, whichever spelling its class folders have; all eight classes must be there."""
        root = self.folder()
        name = matching(domain, subfolders(root))
        if name is None:
            raise UserError(f"{self.found.title}: no folder of domain {domain!r} in {root}")
        folder = root / name
        classes = self.found.classes
        missing = set(classes)
        unknown = []
        for sub in subfolders(folder):
            name_of_class = matching(self.names.get(plain(sub), sub), classes)
            if name_of_class is None:
                unknown.append(sub)
                continue
            missing.discard(name_of_class)
            yield from self.below(folder / sub, classes.index(name_of_class))
        if missing:
            others = ", ".join(unknown[:5]) or "none"
            raise UserError(
                f"{self.found.title}: {folder} has no folder of class {min(missing)!r}; folders of other names: "
                f"{others}; rename the one that is meant"
            )


class Camelyon17(PublishedRows):
    """WILDS's patches: metadata.csv has a row per patch with its hospital (`center`) and label (`tumor`).

    The file of a row is patches/patient_PPP_node_N/patch_patient_PPP_node_N_x_X_y_Y.png. Domains are the hospitals
    0 to 4. The published parts are WILDS's official split: hospital 1 validates, hospital 2 is tested, and of the
    others a patch trains where the column `split` is 0 and validates where it is 1.
    """

    root = "metadata.csv"

    def rows(self, domain: str) -> Iterator[ImageRow]:
        """Patches of one hospital."""
        file = self.folder() / self.root
        version = file.stat().st_mtime_ns
        yield from _patches(file, version).get(domain, [])


WHOLE_PARTS = {1: "validation", 2: "test"}  # hospitals that are a part of WILDS's official split as a whole


@functools.lru_cache(maxsize=2)
def _patches(file: Path, version: int) -> dict[str, list[ImageRow]]:
    numbers = ("node", "x_coord", "y_coord", "tumor", "center", "split")
    types = {"patient": str, **dict.fromkeys(numbers, int)}
    try:
        table = pd.read_csv(file, usecols=list(types), dtype=types)
    except ValueError as error:
        raise UserError(f"{file} is not WILDS's metadata of Camelyon17 ({str(error)[:100]})") from None
    rows: dict[str, list[ImageRow]] = {}
    for row in table.itertuples(index=False):
        slide = f"patient_{row.patient.zfill(3)}_node_{row.node}"
        corner = f"x_{row.x_coord}_y_{row.y_coord}"
        path = f"patches/{slide}/patch_{slide}_{corner}.png"
        part = WHOLE_PARTS.get(row.center) or ("validation" if row.split else "train")
        patch = ImageRow(path, row.tumor, part, row.patient)
        rows.setdefault(f"hospital_{row.center}", []).append(patch)
    return rows


class FedISIC(PublishedRows):
    """Fed-ISIC2019 as FLamby lays it out: train_test_split (a CSV) and one folder of preprocessed images.

    The columns used are image, target (class 0 to 7), center (0 to 5) and fold (train or test).
    """

    root = "train_test_split"
    inputs: ClassVar[str] = "ISIC_2019_Training_Input_preprocessed"

    def rows(self, domain: str) -> Iterator[ImageRow]:
        """Images of one centre."""
        file = self.folder() / self.root
        try:
            table = pd.read_csv(file, usecols=["image", "target", "center", "fold"])
        except ValueError as error:
            raise UserError(f"{file} is not Fed-ISIC2019's split ({str(error)[:100]})") from None
        center = int(domain.removeprefix("center_"))
        of_center = table[table["center"] == center]
        for row in of_center.itertuples(index=False):
            path = f"{self.inputs}/{row.image}.jpg"
            yield ImageRow(path, int(row.target), str(row.fold))
