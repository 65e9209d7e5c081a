"""Replaces files as a whole: writes them under a temporary name and renames them."""

import fcntl
import io
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.common.errors import UserError, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OF_SYSTEM = re.compile(r"\(os error (\d+)\)")  # in a text of a library that is written in Rust
# The temporary names below, of claims and of safetensors, of records alone: `.notes.markdown` is a file of the user.
UNFINISHED = re.compile(r"\..+\.(csv|json|toml|safetensors|lock)\.[a-z0-9_]{8}|\.tmp[A-Za-z0-9]{6}")


def atomic_write(path: Path | str, content: bytes | str, mode: int | None = None, durable: bool = False) -> None:
    """Replace the file as a whole: at any moment, a reader sees either the old or the new content.

    mode: the file's permissions; by default those of any new file
    durable: also wait until the content is on the disk (milliseconds), so that a loss of power does not destroy it: for
        keys and what is known of sites, which cannot be made again; not for the records of a run, which can
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    # Every writer has its own temporary name, because parallel runs of a sweep rebuild the same results.csv.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with writing(path), os.fdopen(handle, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        Path(name).chmod(file_mode() if mode is None else mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Give an error of the disk in the block the name of the file, which the error of a full disk does not have.

    safetensors raises errors of its own class, whose texts have the system's number of the error: they become OSErrors.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Exception as error:
        number = OF_SYSTEM.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def write_figure(figure: "Figure", file: Path, **settings: Any) -> None:
    """Draw the figure into a file of the format that its ending names; the settings are those of `Figure.savefig`.

    UserError for an ending that names no format.
    """
    kind = file.suffix[1:].lower()
    if kind not in figure.canvas.get_supported_filetypes():
        raise UserError(f"{file} names no format of a picture; end it with .png, .svg or .pdf")
    atomic_write(file, drawn(figure, kind, **settings))


def drawn(figure: "Figure", kind: str, **settings: Any) -> bytes:
    """The figure as a file of this format. SVG contains the figure's texts: with control characters it is no XML."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, **settings)
    return printable(buffer.getvalue().decode()).encode() if kind == "svg" else buffer.getvalue()


def remove_unfinished(folder: Path) -> None:
    """Removes what killed writers have left, below the folder too; only where nobody else writes."""
    for file in list(folder.rglob(".*")):
        if UNFINISHED.fullmatch(file.name) and file.is_file():
            file.unlink(missing_ok=True)


def of_home(path: str) -> Path:
    """A path that may begin with `~` for the user's home; UserError for a user who has none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path}: no home folder is known for {path.split('/')[0]}; write the whole path") from None


def is_archive(path: Path) -> bool:
    """Return whether a path names a study's archive and no folder."""
    return path.suffix == ".zip" and not path.is_dir()


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One process at a time is in such a block for the folder; where the file system has no locks, all are."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def storage_time(folder: Path) -> float:
    """The time by the clock of the folder's storage, as files have it; that of shared storage is another machine's."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:  # this process may not write there
        return time.time()


@cache
def file_mode() -> int:
    """The permissions of a new file under the process's umask, for code that makes its own temporary files."""
    umask = os.umask(0o077)
    os.umask(umask)
    return 0o666 & ~umask
