"""Decode once: the images of a domain as one memory-mapped uint8 array on disk, shared by all processes.

    <cache>/<dataset>/<domain>-<hash>/   images.npy [N,C,s,s]   labels.npy [N]   sizes.npy [N,2]   manifest.json
                                         digests.npy [N,16]
                                         looks.npy [N,192], which an entry gets when it is needed

Images are squares, as in DomainBed's evaluation. Their own heights and widths are kept next to them, so that crops can
be drawn with the aspect ratio of the original.

The hash covers data set, size, channels, format and the folder of the files. It also covers every file's relative path,
size and times of modification and of change, so that a changed source gets a new folder. The time of change cannot be
set by programs that unpack archives. It and the folder tell apart two data sets whose files have the same names, sizes
and times of modification. Archives with normalized times give such files, for example bitmaps of one size. Old folders
are never read again and may be deleted at any time.
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from fedsim.common.about import FORMAT
from fedsim.common.console import errors
from fedsim.common.errors import UserError
from fedsim.data.folders import Listing
from fedsim.data.pixel_findings import tally_of
from fedsim.data.pixels import Size, decode_measured, read_bytes, unreadable
from fedsim.data.reader import content_hash, nameless_hash

DECODER = 3  # grows when the same file is decoded to other pixels than before
SEEN = "seen"  # in an entry's manifest: what decoding has seen of the files
DIGESTS = "digests.npy"
DIGEST_BYTES = 16
HASHES = ("content", "nameless")  # in an entry's manifest, from `hashes_of`
THREADS = min(8, max(2, os.cpu_count() or 2))  # that read files
DAY = 86_400.0
PATIENCE = 2.0  # seconds of decoding before a progress bar appears
Decoded = tuple[np.ndarray, Size, Any]  # planes, the file's height and width, what was seen of it
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]  # images, labels, sizes


@dataclass(frozen=True)
class Planes:
    """What a file is decoded to by decode(path, side, bytes): `count` planes [C, s, s] of uint8, and its own size.

    `key` names what the result depends on besides the file; it is empty for the colours of an image. The third thing
    that `decode` gives is what it has seen of the file, and `tally` makes one table for JSON of that of all files.
    """

    count: int = 3
    key: str = ""
    decode: Callable[[Path, int, bytes], Decoded] = decode_measured
    tally: Callable[[Iterable[Any]], dict[str, Any]] = tally_of


COLOURS = Planes()


@dataclass(frozen=True)
class Entry:
    """The decoded images of a domain in the cache; `side` is their height and width."""

    listing: Listing
    dataset: str
    domain: str
    side: int
    cache: Path
    planes: Planes = COLOURS

    @cached_property
    def manifest(self) -> dict:
        """Everything the decoded array depends on, and its hash."""
        content = {
            "format": FORMAT,
            "dataset": self.dataset,
            "domain": self.domain,
            "shape": [len(self.listing.files), self.planes.count, self.side, self.side],
            "decoder": DECODER,
        }
        if self.planes.key:
            content["planes"] = self.planes.key
        digest_of_all = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
        digest_of_all.update(os.fsencode(self.listing.folder.resolve()))
        for name, path, label in zip(self.listing.files, self.listing.paths, self.listing.labels):
            try:
                status = path.stat()
            except (OSError, ValueError) as error:
                raise unreadable(path, error) from None
            facts = f"{name}\0{label}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ctime_ns}\n"
            digest_of_all.update(facts.encode(errors="surrogateescape"))
        return {**content, "hash": digest_of_all.hexdigest()[:16]}

    @property
    def folder(self) -> Path:
        """The folder of its files."""
        name = f"{self.domain}-{self.manifest['hash']}"
        return self.cache / self.dataset / name

    def arrays(self) -> Arrays:
        """Images (read-only memory map, uint8 [N,3,s,s] or other planes), labels int64 [N] and sizes int32 [N,2].

        Sizes are the files' own heights and widths. Images are decoded on first use. Several processes may build the
        same entry: each writes a folder of its own, the first rename wins, and the others discard theirs. Raises
        UserError for an unreadable image (by name) or a cache folder that cannot be written.
        """
        opened = _open(self)
        if opened is None:
            _build(self)
            opened = _open(self)
        if opened is None:
            raise UserError(
                f"the image cache {self.folder} cannot be read back; delete it or set data.cache or $FEDSIM_CACHE"
            )
        return opened

    def seen(self) -> dict[str, Any]:
        """What decoding has seen of the files, as `planes.tally` gives it; images are decoded on first use."""
        self.arrays()
        return _stored(self.folder)[SEEN]

    def hashes(self) -> dict[str, str]:
        """The hashes of the files, see `hashes_of`: from the cache, else by reading the files."""
        stored = _stored(self.folder)
        if "content" in stored:
            return {key: stored[key] for key in HASHES}
        return hashes_of(self.listing, digests_of(self.listing))


def rows_of(digests: list[bytes]) -> np.ndarray:
    """Returns hashes of one length as the rows of an array uint8 [N, length]."""
    joined = b"".join(digests)
    return np.frombuffer(joined, np.uint8).reshape(len(digests), -1)


def digest(content: bytes) -> bytes:
    """Hash of one file's bytes."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def digests_of(listing: Listing) -> list[bytes]:
    """The hash of every file's bytes; a few threads read them."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(lambda path: digest(read_bytes(path)), listing.paths))


def content_of(listing: Listing, digests: list[bytes]) -> str:
    """Fingerprint of a domain: its files' names, labels and the digests of their bytes, in order."""
    names = "\0".join(listing.files).encode(errors="surrogateescape")
    return content_hash(names, listing.labels.tobytes(), b"".join(digests))


def hashes_of(listing: Listing, digests: list[bytes]) -> dict[str, str]:
    """`content`: the fingerprint of a domain; `nameless`: the hash of the same images and labels without the names."""
    return {"content": content_of(listing, digests), "nameless": nameless_hash(listing.labels, digests)}


def _open(entry: Entry) -> Arrays | None:
    """The cached arrays, or None when there are none or they are damaged (e.g. after a power cut)."""
    folder = entry.folder
    stored = _stored(folder)
    try:
        images = np.load(folder / "images.npy", mmap_mode="r", allow_pickle=False)
        labels = np.load(folder / "labels.npy", allow_pickle=False)
        sizes = np.load(folder / "sizes.npy", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    shape = tuple(entry.manifest["shape"])
    sound = (
        "content" in stored
        and SEEN in stored
        and stored | entry.manifest == stored
        and images.shape == shape
        and images.dtype == np.uint8
        and labels.shape == shape[:1]
        and sizes.shape == (shape[0], 2)
    )
    return (images, labels, sizes) if sound else None


def _stored(folder: Path) -> dict:
    """The manifest of an entry; empty when there is none."""
    try:
        return json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        return {}


def _build(entry: Entry) -> None:
    """Decode into a temporary folder, then rename it to the entry's."""
    parent = entry.folder.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(parent)
        temporary = Path(tempfile.mkdtemp(prefix=".tmp-", dir=parent))
    except OSError as error:
        raise _unwritable(parent, error) from None
    try:
        temporary.chmod(0o755)  # mkdtemp makes it private; the cache may be shared between users
        digests, sizes, seen = _write_images(entry, temporary / "images.npy")
        np.save(temporary / DIGESTS, rows_of(digests), allow_pickle=False)
        np.save(temporary / "sizes.npy", sizes, allow_pickle=False)
        np.save(temporary / "labels.npy", entry.listing.labels, allow_pickle=False)
        manifest = {
            **entry.manifest,
            **hashes_of(entry.listing, digests),
            SEEN: entry.planes.tally(seen),
        }
        (temporary / "manifest.json").write_text(json.dumps(manifest))
        _publish(temporary, entry)
    except OSError as error:
        raise _unwritable(entry.folder, error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write the image cache {path} ({error.strerror}); make room there, or set data.cache or $FEDSIM_CACHE"
    )


def _publish(temporary: Path, entry: Entry) -> None:
    """Renames the finished folder. An entry that another process has finished meanwhile is kept, unless damaged."""
    if entry.folder.exists() and _open(entry) is None:
        damaged = temporary.with_name(temporary.name + "-damaged")
        entry.folder.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)
    try:
        temporary.rename(entry.folder)
    except OSError:
        if _open(entry) is None:
            raise


def _write_images(entry: Entry, path: Path) -> tuple[list[bytes], np.ndarray, list[Any]]:
    """Decodes all files with a few threads (PIL releases the GIL) directly into the memory-mapped file.

    Returns the digests of the files, the heights and widths of the images, and what was seen of each file.
    """
    files = entry.listing.paths
    count = len(files)
    images = reserved(path, tuple(entry.manifest["shape"]))
    sizes = np.empty((count, 2), np.int32)
    seen: list[Any] = [None] * count

    def fill(index: int) -> bytes:
        file = files[index]
        content = read_bytes(file)
        images[index], sizes[index], seen[index] = entry.planes.decode(file, entry.side, content)
        return digest(content)

    with ThreadPoolExecutor(THREADS) as pool:
        title = f"decoding {entry.dataset} {entry.domain}"
        digests = list(_with_bar(pool.map(fill, range(count)), count, title))
    images.flush()
    return digests, sizes, seen


def reserved(path: Path, shape: tuple[int, ...]) -> np.memmap:
    """A new file that holds a uint8 array, as a memory map. Its space on the disk is taken at once.

    So a full disk is an OSError here, and not a bus error while the map is written.
    """
    images = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return images


def remove_leftovers(folder: Path) -> None:
    """Delete temporary folders that interrupted builds left more than a day ago."""
    for leftover in folder.glob(".tmp-*"):
        try:
            if time.time() - leftover.stat().st_mtime > DAY:
                shutil.rmtree(leftover, ignore_errors=True)
        except OSError:
            continue  # another process was faster


def _with_bar(items: Iterator[bytes], total: int, title: str) -> Iterator[bytes]:
    """The items, and a transient bar on stderr that appears once they take longer than PATIENCE."""
    start = time.monotonic()
    bar = Progress(console=errors, transient=True)
    task = bar.add_task(title, total=total)
    try:
        for done, item in enumerate(items, start=1):
            is_slow = time.monotonic() - start > PATIENCE
            if errors.is_terminal and is_slow and not bar.live.is_started:
                bar.start()
            bar.update(task, completed=done)
            yield item
    finally:
        if bar.live.is_started:
            bar.stop()
