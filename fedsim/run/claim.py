"""A lock on a run's folder, so that only one process writes to it.

The kernel releases the lock when the process that holds it ends, in whatever way. No lock file has to be removed by
hand.
"""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fedsim.common.errors import UserError
from fedsim.common.files import remove_unfinished

FILE = ".lock"
PATIENCE_SECONDS = 5.0  # a killed sweep's workers need a moment to notice


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Lock a run's folder and remove what killed writers left in it.

    Raises UserError when another process still holds the lock after PATIENCE_SECONDS.
    """
    file = folder / FILE
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (handle := _lock(file)) is None:
        if time.monotonic() >= deadline:
            raise UserError(
                f"{folder} is being written by another process ({_holder(file)}); wait until it ends, or stop it"
            )
        time.sleep(0.1)
    with handle:
        handle.truncate(0)
        handle.write(f"process {os.getpid()} on {socket.gethostname()}")
        handle.flush()
        remove_unfinished(folder)
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def _lock(file: Path) -> IO[str] | None:
    """The locked file; None while another process holds the lock."""
    file.parent.mkdir(parents=True, exist_ok=True)  # the holder may have removed the folder of a run that was refused
    handle = file.open("a+", encoding="utf-8")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # If the holder has removed this file between our open and our lock, another process may hold a new file.
        if file.exists() and os.path.samestat(os.fstat(handle.fileno()), file.stat()):
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:  # a file system without locks
        return handle
    handle.close()
    return None


def _holder(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8") or "unknown"
    except OSError:
        return "unknown"


def is_claimed(folder: Path) -> bool:
    """Whether a living process holds the folder's lock. Changes nothing."""
    try:
        with (folder / FILE).open(encoding="utf-8") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or a file system without locks
        return False
    return False
