"""A claim on a run's folder, so that only one process writes to it, on one machine or on several that share storage.

The claim is a file that one process alone can create, on NFS too. It names its holder, who renews the file's time every
BEAT_SECONDS. On the holder's machine the kernel's lock tells at once whether the holder is alive. Elsewhere, and where
the file system has no locks, a claim is free when its time is GONE_SECONDS old by the storage's own clock. A holder
that was asleep for so long finds another claim in the place of its own, and writes nothing more (`Claim.check`).

filelock's SoftFileLease does not fit: it takes over only what it has itself watched for the whole time, and it cannot
be asked without taking.
"""

import errno
import fcntl
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO

from fedsim.common.errors import ClaimedError
from fedsim.common.files import alone, remove_unfinished, storage_time

FILE = ".lock"
PATIENCE_SECONDS = 5.0  # a killed sweep's workers need a moment to notice
BEAT_SECONDS = 20.0
GONE_SECONDS = 120.0
UNNAMED_SECONDS = 1.0  # its maker was killed, if a claim names no holder for so long
LONGEST_NAME = 200  # characters of a holder's name that are shown


class Claim:
    """A run's folder that this process holds."""

    def __init__(self, file: Path, handle: IO[str], text: str) -> None:
        self._file = file
        self._handle = handle
        self._text = text
        self._over = threading.Event()
        self._renewal = threading.Thread(target=self._renew, daemon=True)

    def stands(self) -> bool:
        """Whether the folder is still this process's."""
        try:
            return self._file.read_text(encoding="utf-8", errors="replace") == self._text
        except OSError:
            return False

    def check(self) -> None:
        """Raises ClaimedError when another process has taken the folder over; called before records are written."""
        if self.stands():
            return
        holder, _ = _look(self._file)
        silent = f"because this one gave no sign for {GONE_SECONDS:g} s"
        if not holder:
            raise ClaimedError(
                f"{self._file} is gone: somebody removed it, or its folder, or another process took the folder over, "
                f"{silent}, and has ended"
            )
        raise ClaimedError(
            f"{self._file.parent} was taken over by another process ({holder}), {silent}; the run goes on there"
        )

    def __enter__(self) -> "Claim":
        self._renewal.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._renewal.join()
        if self.stands():
            self._file.unlink(missing_ok=True)
        self._handle.close()

    def _renew(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            with suppress(OSError):  # the storage does not answer; a later beat may reach it
                os.utime(self._handle.fileno())


@contextmanager
def claim(folder: Path) -> Iterator[Claim]:
    """Claims a run's folder and removes what killed writers left in it.

    Raises ClaimedError when another process still has it after PATIENCE_SECONDS.
    """
    file = folder / FILE
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (taken := _take(file)) is None:
        if time.monotonic() >= deadline:
            name, _ = _look(file)
            holder = name or "unknown"
            raise ClaimedError(
                f"{folder} is being written by another process ({holder}); wait until it ends, or stop it; what a "
                f"machine that is gone has claimed is free {GONE_SECONDS:g} s after its last sign"
            )
        time.sleep(0.1)
    with taken:
        remove_unfinished(folder)
        yield taken


def is_claimed(folder: Path) -> bool:
    """Whether a living process, on any machine, holds the folder."""
    try:
        _, is_alive = _look(folder / FILE)
        return is_alive
    except OSError:  # whoever writes there is told why
        return False


def is_abandoned(folder: Path) -> bool:
    """Whether the folder has the claim of a holder that died; one that ends by itself takes its claim away."""
    return (folder / FILE).is_file() and not is_claimed(folder)


def free(folder: Path) -> bool:
    """Removes the claim of a dead holder, if there is one; returns False while its holder lives."""
    file = folder / FILE
    with alone(folder):
        text, is_alive = _look(file, whole=True)
        if not is_alive:
            _clear(file, text)
        return not is_alive


def _take(file: Path) -> Claim | None:
    """Returns the claim of this process; None while another one has it."""
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    text = f"{holder}\n{kernel()} {secrets.token_hex(8)}\n"
    file.parent.mkdir(parents=True, exist_ok=True)  # the holder may have removed the folder of a run that was refused
    try:
        if not free(file.parent):
            return None
        handle = file.open("x", encoding="utf-8")
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOENT, errno.ESTALE):  # another process was quicker, or removed it
            return None
        raise
    with suppress(OSError):  # a file system without locks
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    handle.write(text)
    handle.flush()
    os.close(os.dup(handle.fileno()))  # NFS shows the text to other machines when a descriptor is closed
    claim = Claim(file, handle, text)
    if claim.stands():
        return claim
    handle.close()
    return None


def _look(file: Path, whole: bool = False) -> tuple[str, bool]:
    """Returns (the claim's holder, or its `whole` text; whether the holder is alive); ("", False) without a claim."""
    try:
        with file.open(encoding="utf-8", errors="replace") as handle:  # NFS then asks for the file's present time
            text = handle.read()
            holder = text if whole else text.partition("\n")[0][:LONGEST_NAME]
            if f"\n{kernel()} " in text:
                try:
                    fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return holder, False
                except BlockingIOError:
                    return holder, True
                except OSError:  # a file system without locks
                    pass
            age = storage_time(file.parent) - os.fstat(handle.fileno()).st_mtime
            return holder, age < (GONE_SECONDS if text else UNNAMED_SECONDS)
    except (FileNotFoundError, NotADirectoryError):
        return "", False


def _clear(file: Path, text: str) -> None:
    """Removes the claim with this text, but no other: a process of another machine may have taken it over already."""
    aside = file.with_name(f".gone{FILE}.{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        file.rename(aside)
        if aside.read_text(encoding="utf-8", errors="replace") == text:
            aside.unlink()
        else:
            aside.rename(file)


@cache
def kernel() -> str:
    """Returns what tells the running system of this machine from others, whose locks its kernel does not know."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return socket.gethostname()
