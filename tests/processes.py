"""Processes of this machine: waiting for them, finding them, ending them."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], seconds: float = 60.0, what: str = "what was waited for") -> T:
    """The first true value of a condition; a TimeoutError says what did not come."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {seconds:g} s")
        time.sleep(0.03)
    return value


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """All descendants of a process, children before their own children."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += [int(word) for word in task.read_text().split()]
    return [each for child in children for each in (child, *descendants(child))]


def kill_tree(pid: int) -> None:
    """SIGKILL to a process and all its descendants, until none is left."""
    while found := [each for each in [*descendants(pid), pid] if is_alive(each)]:
        for each in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        time.sleep(0.01)


def command_lines(folder: Path = Path("/")) -> dict[int, str]:
    """The command lines of the other processes, of those that work below a folder."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink().is_relative_to(folder) and process.name != str(os.getpid()):
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(process.name)] = words.decode(errors="replace")
    return found
