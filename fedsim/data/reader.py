"""The interface of every data set's reader: the images of a domain, only their labels, and a fingerprint of both."""

import hashlib
from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from fedsim.common.errors import UserError
from fedsim.data.row import Benchmark
from fedsim.settings import DataSettings
from fedsim.settings.plugins import load

Images = tuple[np.ndarray, np.ndarray]  # uint8 [N,C,s,s], and their labels int64 [N]


class Reader:
    """Reads the domains of one data set; a row of BENCHMARKS names its reader as "module:class"."""

    own_files: ClassVar[bool] = False  # every domain has image files of its own, so that no two fingerprints are equal

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
        """Masks uint8 [N,Q,s,s] of 0 and 1 beside `images`, one plane for each structure; None without structures."""
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
    if not (isinstance(kind, type) and issubclass(kind, Reader)):
        raise UserError(f"reader {bench.reader!r} of {bench.title} is no class that derives from {__name__}.Reader")
    return kind


def nameless_hash(labels: np.ndarray, digests: Iterable[bytes]) -> str:
    """Hash of the images of a domain, each with its label [N], in any order."""
    pairs = zip(labels.tolist(), digests, strict=True)
    return content_hash(*sorted(str(label).encode() + b":" + one for label, one in pairs))


def content_hash(*parts: bytes) -> str:
    """Short hash of byte strings, each with its length."""
    digest = hashlib.blake2b(digest_size=10)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()
