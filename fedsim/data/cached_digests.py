"""What the cache keeps next to the decoded images of a domain: digests of the files, and what the images look like."""

import contextlib
import io
from collections.abc import Callable

import numpy as np

from fedsim.common.files import atomic_write
from fedsim.data.cache import DIGEST_BYTES, DIGESTS, Entry, digests_of, rows_of

LOOK_SIDE = 8


def file_digests(entry: Entry) -> np.ndarray:
    """Digests uint8 [N,16] of the bytes of a domain's files, from the cache where it has them, else read once."""
    shape = (len(entry.listing.files), DIGEST_BYTES)
    return kept(entry, DIGESTS, shape, lambda: rows_of(digests_of(entry.listing)))


def image_looks(entry: Entry) -> np.ndarray:
    """Means uint8 [N,192] of 8 x 8 parts of a domain's images, which another encoding of a picture hardly changes."""
    images = entry.arrays()[0]
    edges = np.arange(LOOK_SIDE) * entry.side // LOOK_SIDE

    def means() -> np.ndarray:
        sums = []
        for start in range(0, len(images), 256):
            of_columns = np.add.reduceat(images[start : start + 256], edges, 3, np.uint32)
            sums.append(np.add.reduceat(of_columns, edges, 2))
        widths = np.diff([*edges, entry.side])
        pixels = np.multiply.outer(widths, widths)
        levels = (np.concatenate(sums) // pixels).astype(np.uint8)
        return levels.reshape(len(images), -1)

    return kept(entry, "looks.npy", (len(images), 3 * LOOK_SIDE**2), means)


def kept(
    entry: Entry,
    name: str,
    shape: tuple[int, int],
    make: Callable[[], np.ndarray],
) -> np.ndarray:
    """The uint8 array of a file next to a domain's decoded images, made where it is not there."""
    file = entry.folder / name
    with contextlib.suppress(OSError, ValueError, EOFError):
        values = np.load(file, allow_pickle=False)
        if values.shape == shape and values.dtype == np.uint8:
            return values
    values = make()
    if file.parent.is_dir():  # the folder of another user cannot be written: then they are read again
        with contextlib.suppress(OSError):
            buffer = io.BytesIO()
            np.save(buffer, values, allow_pickle=False)
            atomic_write(file, buffer.getvalue())
    return values
