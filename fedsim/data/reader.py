"""The interface of every data set's reader: the images of a domain, only their labels, and a fingerprint of both."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from fedsim.common.errors import UserError
from fedsim.data.findings import Finding
from fedsim.data.names import composed
from fedsim.data.row import Benchmark
from fedsim.settings import DataSettings
from fedsim.settings.plugins import load

# uint8 [N,C,s,s], or float32 [N, ...] of a data set of tensors (`Benchmark.shape`); and their labels int64 [N]
Images = tuple[np.ndarray, np.ndarray]


class Reader:
    """Reads the domains of one data set; a row of BENCHMARKS names its reader as "module:class"."""

    own_files: ClassVar[bool] = False  # every domain has image files of its own, so that no two fingerprints are equal
    reads_root: ClassVar[bool] = True  # its files are in `data.root`, and not in a package
    takes_lists: ClassVar[bool] = False  # `data.lists` may name a folder of lists, which say what trains and is tested

    def __init__(self, data: DataSettings, bench: Benchmark) -> None:
        self.data, self.found = data, bench

    def find(self) -> None:
        """Raise UserError when the data set's files are not there; opens no image."""

    def images(self, domain: str, apart: bool = False) -> Images:
        """Images uint8 [N,C,s,s] and labels int64 [N] of a whole domain.

        `apart` asks for the images that no client holds (rows with `test_apart`).
        """
        raise NotImplementedError

    def labels(self, domain: str) -> np.ndarray:
        """Only the labels int64 [N]; image trees list their files and open none."""
        return self.images(domain)[1]

    def sizes(self, domain: str) -> np.ndarray | None:
        """Height and width int [N,2] of the images before they were resized to a square, for the aspect ratio of crops.

        None means that they were square.
        """
        return None

    def masks(self, domain: str, apart: bool = False) -> np.ndarray | None:
        """What is learned of each example, where it is no class; None where labels are all.

        Masks uint8 [N,Q,s,s] of 0 and 1, one plane for each structure, or targets float32 [N,Q] of numbers or labels.
        """
        return None

    def listed(self, domain: str, part: str) -> np.ndarray | None:
        """Indices of the images that a published list names (`part`: train, validation, test); None without a list."""
        raise UserError(f"{self.found.title} has no files that a list could name; use data.split = 'stratified'")

    def unlisted(self, domain: str, part: str) -> str:
        """The text of the error when a list that the settings need is not there."""
        where = f" in {self.data.lists}" if self.data.lists else ""
        return f"no list {domain}_{part}*.txt{where}; data.split and data.test_split ask for one"

    def required(self, domain: str, part: str) -> np.ndarray:
        """Indices of the images that a published list names; UserError without the list."""
        indices = self.listed(domain, part)
        if indices is None:
            raise UserError(self.unlisted(domain, part))
        return indices

    def groups(self, domain: str) -> np.ndarray | None:
        """Numbers int64 [N] of the groups of a domain's images, whose images are never split; None without groups.

        The numbers do not depend on labels. UserError for settings that name groups which the data set does not have.
        """
        if self.data.group:
            raise UserError(
                f"{self.found.title} has no groups that data.group = {self.data.group!r} could name; 'folder' is for "
                "image trees, 'patient' for camelyon17; tables have data.columns.group"
            )
        return None

    def findings(self) -> list[Finding]:
        """What the names, labels and folders of the used domains show; opens no image."""
        return []

    def file_findings(self) -> list[Finding]:
        """What decoding the images of the used domains has seen; they are decoded on first use."""
        return []

    def value_findings(self) -> list[Finding]:
        """What the values of features show. They quote single values, so that a site keeps them to itself."""
        return []

    def digests(self, domain: str) -> np.ndarray | None:
        """Digests uint8 [N,16] of the bytes of a domain's image files, which find copies; None without such files."""
        return None

    def looks(self, domain: str) -> np.ndarray | None:
        """What a domain's images look like, uint8 [N,D], which finds copies in other encodings; None without files."""
        return None

    def fingerprint(self, domain: str) -> str:
        """A hash of a domain's content: equal for equal data, wherever it is stored, and for every seed."""
        raise NotImplementedError

    def nameless(self, domain: str) -> str:
        """A hash of a domain's images with their labels, in any order and without the names of files.

        It finds a domain that is a copy of another one. It is empty where it is not known.
        """
        return ""


def reader(data: DataSettings, bench: Benchmark) -> Reader:
    """The reader of a data set, imported when needed (torch, PIL)."""
    return reader_class(bench)(data, bench)


def reader_class(bench: Benchmark) -> type[Reader]:
    """The class that a row names as its reader; UserError when it does not derive from Reader."""
    kind = load(bench.reader, "reader")
    is_reader = isinstance(kind, type) and issubclass(kind, Reader)
    if not is_reader:
        raise UserError(f"reader {bench.reader!r} of {bench.title} is no class that derives from {__name__}.Reader")
    return kind


def read_images(read: Reader, domain: str, apart: bool = False) -> Images:
    """What a reader gives for a domain, its labels as int64 [N]; see `Reader.images`.

    Raises UserError for images that are not uint8 [N,C,s,s] with the data set's number of channels, and for labels that
    are not the numbers of its classes. It also refuses tensors that are not float32 of its shape. Floats of a reader
    for images would otherwise be divided by 255.
    """
    images, labels = read.images(domain, apart)
    bench = read.found
    fault = _fault_of_examples(images, bench)
    if not fault:
        fault = _fault_of_labels(labels, len(images), len(bench.classes))
    if fault:
        raise _reader_error(read, domain, fault)
    return images, labels.astype(np.int64, copy=False)


def read_groups(read: Reader, domain: str, count: int) -> np.ndarray | None:
    """The groups int64 [N] that a reader gives for the `count` images of a domain, or None; see `Reader.groups`.

    Raises UserError for groups that are not as many integers as there are images.
    """
    groups = read.groups(domain)
    if groups is None:
        return None
    is_right = groups.shape == (count,) and groups.dtype.kind in "iu"
    if not is_right:
        given = f"groups {groups.dtype} of the shape {list(groups.shape)}"
        raise _reader_error(read, domain, f"there are {count} examples, and {given}, not int64 [N]")
    return groups


def _reader_error(read: Reader, domain: str, fault: str) -> UserError:
    return UserError(f"{type(read).__name__} of {read.found.title}, domain {domain!r}: {fault}")


def with_repeats(names: Iterable[str]) -> set[str]:
    """The names of the groups of some images, without the empty name; empty where no group has two images."""
    sizes = Counter(names)
    sizes.pop("", None)
    has_repeats = max(sizes.values(), default=0) > 1
    return set(sizes) if has_repeats else set()


def numbers_of_groups(names: Iterable[object]) -> np.ndarray:
    """Numbers int64 [N] of the groups that these names give to N images, in the order of the sorted names.

    A name in two Unicode forms is one group.
    """
    texts = np.array([composed(str(name)) for name in names], dtype=object)
    _, numbers = np.unique(texts, return_inverse=True)
    return numbers.astype(np.int64)


def _fault_of_examples(images: np.ndarray, bench: Benchmark) -> str:
    """What is wrong with the type or the axes of a reader's images or tensors; empty for nothing."""
    shape, kind = list(images.shape), images.dtype
    if bench.shape:
        if kind == np.float32 and images.shape[1:] == bench.shape:
            return ""
        axes = ", ".join(map(str, bench.shape))
        return f"examples are {kind} {shape}, not float32 [N, {axes}]"
    if kind != np.uint8:
        return (
            f"images are {kind} {shape}, not uint8 from 0 to 255; numbers that are no pixels belong to a data set with "
            "Benchmark.shape, or to data.dataset = 'arrays'"
        )
    if images.ndim == 4:
        _, channels, height, width = images.shape
        if channels == bench.channels and height == width:
            return ""
    return f"images have the shape {shape}, not [N, {bench.channels}, s, s]"


def _fault_of_labels(labels: np.ndarray, count: int, classes: int) -> str:
    """What is wrong with a reader's labels; empty for nothing."""
    if labels.shape != (count,):
        return f"there are {count} examples and labels of the shape {list(labels.shape)}"
    if not count:
        return ""
    low, high = labels.min(), labels.max()
    if labels.dtype.kind in "iu" and 0 <= low <= high < classes:
        return ""
    span = f"{labels.dtype} from {low} to {high}"
    return f"labels are {span}, not the numbers 0 to {classes - 1} of the classes"


def nameless_hash(labels: np.ndarray, digests: Iterable[bytes]) -> str:
    """Hash of the images of a domain, each with its label [N], in any order."""
    pairs = zip(labels.tolist(), digests, strict=True)
    parts = [str(label).encode() + b":" + digest for label, digest in pairs]
    return content_hash(*sorted(parts))


def content_hash(*parts: bytes) -> str:
    """Short hash of byte strings, each with its length."""
    digest = hashlib.blake2b(digest_size=10)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()
