"""What is made once from a data set whose images are no single files, and kept in plain files of the cache."""

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.common.errors import UserError
from fedsim.common.files import atomic_write
from fedsim.data.cache import remove_leftovers, reserved
from fedsim.data.pixel_findings import tally_of
from fedsim.data.pixels import decode_measured

Kept = tuple[np.ndarray, np.ndarray, dict[str, Any]]  # images, their sizes, and the numbers of `tally_of`
Cells = Iterable[tuple[Path, bytes | None]]  # name and bytes of each image; None where the name is that of its file


def decoded(file: Path, shape: tuple[int, ...], cells: Callable[[], Cells]) -> Kept:
    """Images uint8 [N,3,s,s] of `shape` in the file; from those next to it their own heights and widths [N,2], and what
    decoding has seen of them.

    They are decoded from `cells` when a file is not there or is damaged. Raises UserError when they cannot be written.
    """
    if (array := _stored(file, shape)) is None:
        _decode(file, shape, cells())
        array = _stored(file, shape)
    if array is None:
        raise UserError(f"the image cache {file} cannot be read back; delete it or set data.cache")
    return array


def content(file: Path, size: int, make: Callable[[], bytes]) -> bytes:
    """The content of a file, which is made when the file is not there or has another size."""
    if file.is_file() and file.stat().st_size == size:
        return file.read_bytes()
    found = make()
    try:
        atomic_write(file, found)
    except OSError as error:
        raise _unwritable(file, error) from None
    return found


def _sizes(file: Path) -> Path:
    return file.with_suffix(".sizes.npy")


def _seen(file: Path) -> Path:
    return file.with_suffix(".seen.json")


def _stored(file: Path, shape: tuple[int, ...]) -> Kept | None:
    """The images, their sizes and what was seen of them; None when there are none or they are damaged."""
    try:
        images = np.load(file, mmap_mode="r", allow_pickle=False)
        sizes = np.load(_sizes(file), allow_pickle=False)
        seen = json.loads(_seen(file).read_text())
    except (OSError, ValueError, EOFError):
        return None
    return (images, sizes, seen) if images.shape == shape and sizes.shape == (shape[0], 2) else None


def _decode(file: Path, shape: tuple[int, ...], cells: Cells) -> None:
    """Writes all files in a temporary folder, then moves them, the images last."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(file.parent)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=".tmp-") as folder:
            images, sizes = reserved(Path(folder, file.name), shape), np.empty((shape[0], 2), np.int32)
            measured = []
            for index, (name, complete) in enumerate(cells):
                images[index], sizes[index], measures = decode_measured(name, shape[-1], complete)
                measured.append(measures)
            images.flush()
            np.save(Path(folder, _sizes(file).name), sizes, allow_pickle=False)
            Path(folder, _seen(file).name).write_text(json.dumps(tally_of(measured)))
            for path in (_sizes(file), _seen(file), file):
                Path(folder, path.name).replace(path)
    except OSError as error:
        raise _unwritable(file, error) from None


def _unwritable(file: Path, error: OSError) -> UserError:
    return UserError(f"cannot write the image cache {file} ({error.strerror}); set data.cache")
