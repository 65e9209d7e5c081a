"""Decode once: the images of a domain as one memory-mapped uint8 array on disk, shared by all processes.

    <cache>/<dataset>/<domain>-<hash>/   images.npy [N,C,s,s]   labels.npy [N]   sizes.npy [N,2]   manifest.json
                                         digests.npy [N,16], which entries of earlier versions get when it is needed
                                         looks.npy [N,192], which an entry gets when it is needed

Images are squares, as in DomainBed's evaluation. Their own heights and widths are kept beside them, so that crops can
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from fedsim.common.errors import UserError
from fedsim.data.folders import Listing
from fedsim.data.pixels import decode_sized, read_bytes, unreadable
from fedsim.data.reader import content_hash, nameless_hash

FORMAT = 5
DIGESTS = "digests.npy"
DIGEST_BYTES = 16
THREADS = min(8, max(2, os.cpu_count() or 2))  # that read files
DAY = 86_400.0
PATIENCE = 2.0  # seconds of decoding before a progress bar appears
Report = Callable[[int, int], None]  # (images decoded, images in all)
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]  # images, labels, sizes


@dataclass(frozen=True)
class Planes:
    """What one file is decoded to: `count` planes [C, s, s] of uint8 and the file's own size, by decode(path, side,
    bytes).

    `key` names what the result depends on beside the file; it is empty for the colours of an image.
    """

    count: int = 3
    key: str = ""
    decode: Callable[[Path, int, bytes], tuple[np.ndarray, tuple[int, int]]] = decode_sized


COLOURS = Planes()


def cached_images(
    listing: Listing, dataset: str, domain: str, image_size: int, cache: Path, report: Report | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Images (read-only memory map, uint8 [N,3,s,s]) and labels int64 [N] of a domain; see `cached_domain`."""
    return cached_domain(listing, dataset, domain, image_size, cache, report)[:2]


def cached_domain(
    listing: Listing,
    dataset: str,
    domain: str,
    image_size: int,
    cache: Path,
    report: Report | None = None,
    planes: Planes = COLOURS,
) -> Arrays:
    """Images (read-only memory map, uint8 [N,3,s,s] or other planes), labels int64 [N] and sizes int32 [N,2] of a
    domain.

    Sizes are the files' own heights and widths. Images are decoded on first use. `report(done, total)` replaces the
    progress bar on stderr. Several processes may build the same entry: each writes a folder of its own, the first
    rename wins, and the others discard theirs. Raises UserError for an unreadable image (by name) or a cache folder
    that cannot be written.
    """
    manifest = manifest_of(listing, dataset, domain, image_size, planes)
    entry = cache / dataset / f"{domain}-{manifest['hash']}"
    opened = _open(entry, manifest)
    if opened is None:
        _build(listing, manifest, entry, report, planes)
        opened = _open(entry, manifest)
    if opened is None:
        raise UserError(f"the image cache {entry} cannot be read back; delete it or set data.cache or $FEDSIM_CACHE")
    return opened


def stored_hashes(listing: Listing, dataset: str, domain: str, image_size: int, cache: Path) -> dict[str, str]:
    """The hashes of a domain's files as the cache has them, see `hashes_of`; empty where they were not decoded yet.

    Entries of earlier versions have no hash without names.
    """
    manifest = manifest_of(listing, dataset, domain, image_size)
    stored = _stored(cache / dataset / f"{domain}-{manifest['hash']}")
    return {key: stored[key] for key in ("content", "nameless") if key in stored}


def rows_of(digests: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES)


def digest(content: bytes) -> bytes:
    """Hash of one file's bytes."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def content_of(listing: Listing, digests: list[bytes]) -> str:
    """Fingerprint of a domain: its files' names, labels and the digests of their bytes, in order."""
    names = "\0".join(listing.files).encode(errors="surrogateescape")
    return content_hash(names, listing.labels.tobytes(), b"".join(digests))


def hashes_of(listing: Listing, digests: list[bytes]) -> dict[str, str]:
    """`content`: the fingerprint of a domain; `nameless`: the hash of the same images and labels without the names."""
    return {"content": content_of(listing, digests), "nameless": nameless_hash(listing.labels, digests)}


def manifest_of(listing: Listing, dataset: str, domain: str, image_size: int, planes: Planes = COLOURS) -> dict:
    """Everything the decoded array depends on, and its hash."""
    shape = [len(listing.files), planes.count, image_size, image_size]
    content = {"format": FORMAT, "dataset": dataset, "domain": domain, "shape": shape}
    content |= {"planes": planes.key} if planes.key else {}
    whole = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    whole.update(os.fsencode(listing.folder.resolve()))
    for name, label in zip(listing.files, listing.labels):
        try:
            status = (listing.folder / name).stat()
        except (OSError, ValueError) as error:
            raise unreadable(listing.folder / name, error) from None
        facts = f"{name}\0{label}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ctime_ns}\n"
        whole.update(facts.encode(errors="surrogateescape"))
    return {**content, "hash": whole.hexdigest()[:16]}


def _open(entry: Path, manifest: dict) -> Arrays | None:
    """The cached arrays, or None when there are none or they are damaged (e.g. after a power cut)."""
    stored = _stored(entry)
    try:
        images = np.load(entry / "images.npy", mmap_mode="r", allow_pickle=False)
        labels = np.load(entry / "labels.npy", allow_pickle=False)
        sizes = np.load(entry / "sizes.npy", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    shape = tuple(manifest["shape"])
    sound = (
        "content" in stored
        and stored | manifest == stored
        and images.shape == shape
        and images.dtype == np.uint8
        and labels.shape == shape[:1]
        and sizes.shape == (shape[0], 2)
    )
    return (images, labels, sizes) if sound else None


def _stored(entry: Path) -> dict:
    """The manifest of an entry; empty when there is none."""
    try:
        return json.loads((entry / "manifest.json").read_text())
    except (OSError, ValueError):
        return {}


def _build(listing: Listing, manifest: dict, entry: Path, report: Report | None, planes: Planes) -> None:
    """Decode into a temporary folder, then rename it to `entry`."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(entry.parent)
        temporary = Path(tempfile.mkdtemp(prefix=".tmp-", dir=entry.parent))
    except OSError as error:
        raise _unwritable(entry.parent, error) from None
    try:
        temporary.chmod(0o755)  # mkdtemp makes it private; the cache may be shared between users
        digests, sizes = _write_images(listing, manifest, temporary / "images.npy", report, planes)
        np.save(temporary / DIGESTS, rows_of(digests), allow_pickle=False)
        np.save(temporary / "sizes.npy", sizes, allow_pickle=False)
        np.save(temporary / "labels.npy", listing.labels, allow_pickle=False)
        (temporary / "manifest.json").write_text(json.dumps({**manifest, **hashes_of(listing, digests)}))
        _publish(temporary, entry, manifest)
    except OSError as error:
        raise _unwritable(entry, error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write the image cache {path} ({error.strerror}); make room there, or set data.cache or $FEDSIM_CACHE"
    )


def _publish(temporary: Path, entry: Path, manifest: dict) -> None:
    """Renames the finished folder. An entry that another process has finished in the meantime is kept; a damaged one is
    replaced."""
    if entry.exists() and _open(entry, manifest) is None:
        damaged = temporary.with_name(temporary.name + "-damaged")
        entry.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)
    try:
        temporary.rename(entry)
    except OSError:
        if _open(entry, manifest) is None:
            raise


def _write_images(
    listing: Listing, manifest: dict, path: Path, report: Report | None, planes: Planes
) -> tuple[list[bytes], np.ndarray]:
    """Decodes all files with a few threads (PIL releases the GIL) directly into the memory-mapped file.

    Returns the digests of the files, and the heights and widths of the images.
    """
    shape = tuple(manifest["shape"])
    images = reserved(path, shape)

    def fill(index: int) -> bytes:
        path = listing.folder / listing.files[index]
        content = read_bytes(path)
        images[index], sizes[index] = planes.decode(path, shape[-1], content)
        return digest(content)

    digests, sizes = [], np.empty((len(listing.files), 2), np.int32)
    with ThreadPoolExecutor(THREADS) as pool, _progress(manifest, report) as show:
        for one in pool.map(fill, range(len(listing.files))):
            digests.append(one)
            show(len(digests), len(listing.files))
    images.flush()
    return digests, sizes


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


@contextmanager
def _progress(manifest: dict, report: Report | None) -> Iterator[Report]:
    """`report` itself, or a transient bar on stderr that appears once decoding takes longer than PATIENCE."""
    if report is not None:
        yield report
        return
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True)
    task = bar.add_task(f"decoding {manifest['dataset']} {manifest['domain']}", total=None)
    start = time.monotonic()

    def show(done: int, total: int) -> None:
        if console.is_terminal and not bar.live.is_started and time.monotonic() - start > PATIENCE:
            bar.start()
        if bar.live.is_started:
            bar.update(task, completed=done, total=total)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()
