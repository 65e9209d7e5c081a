"""Files that appear as a whole: written beside their place, then renamed over it."""

import os
import tempfile
from functools import cache
from pathlib import Path


def atomic_write(path: Path | str, content: bytes | str, mode: int | None = None, durable: bool = True) -> None:
    """Replace the file as a whole: whoever reads it, at any moment, sees the old or the new content, never a part.

    mode: the file's permissions, those of a new file by default. durable: also wait until the disk has it, so that the
    content survives a loss of power.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    # A name of its own for every writer: parallel runs of a sweep rebuild the same results.csv.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        Path(name).chmod(file_mode() if mode is None else mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@cache
def file_mode() -> int:
    """Permissions of a new file under the process's umask, for code that makes its own temporary files."""
    umask = os.umask(0o077)
    os.umask(umask)
    return 0o666 & ~umask
