"""Turns every error of a command into one line for the user and an exit code.

2: the user can correct it (settings, files, disks). 1: a client failed, and its traceback is printed, or an unexpected
error happened, whose traceback is written to a log file. 130: the command was interrupted.
"""

import atexit
import contextlib
import errno
import importlib.util
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TextIO

from fedsim.common.errors import ClientFailedError, UserError, printable
from fedsim.common.user_code import place_of_error

OWN_PACKAGES = ("clients", "strategies")
# Errors that a user can correct, for example at a file or a disk.
MENDABLE = {
    getattr(errno, name)
    for name in (
        *("ENOENT", "ENOTDIR", "EISDIR", "EEXIST", "EACCES", "EPERM", "EROFS", "ENOSPC", "EDQUOT", "EFBIG"),
        *("ENAMETOOLONG", "ELOOP", "EMFILE", "ENFILE", "EIO", "ENOTEMPTY", "ESTALE"),
    )
}
INTERRUPTED = "interrupted; the same command continues where it stopped"


def answer_signals() -> None:
    """Let Ctrl-C and a termination raise KeyboardInterrupt."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell in the background starts commands that ignore SIGINT
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def guarded(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code. Every exception becomes one line on the standard error."""
    with _any_encoding():
        code = _run(command)
        return _flush(code)


def _run(command: Callable[[], int | None]) -> int:
    try:
        refuse_hidden_packages()
        return command() or 0
    except UserError as error:
        return complain(str(error), 2)
    except ClientFailedError as error:
        return complain(str(error), 1)
    except KeyboardInterrupt:
        return complain(INTERRUPTED, 130)
    except BrokenPipeError:  # the program that read our output has ended: `fedsim compare ... | head`
        _silence(sys.stdout)
        return 1
    except Exception as error:
        return complain(*explain(error))


def explain(error: Exception) -> tuple[str, int]:
    """(one line, exit code) for an error whose class does not say whether the user can correct it."""
    if hasattr(error, "format_message"):  # click's usage errors
        return error.format_message(), 2
    if isinstance(error, OSError) and error.errno in MENDABLE:
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        return f"{where or 'cannot write: '}{error.strerror}; correct that and give the same command again", 2
    what = " ".join(f"{type(error).__name__}: {error}".split())
    if "No space left on device" in what:  # some libraries raise errors of their own class for it
        return f"{what}; free some space and give the same command again", 2
    place = place_of_error(error)
    where = f"in a file of yours, {place}" if place else "an unexpected error"
    return f"{what[:500]} ({where}{_kept(error)})", 1


def _kept(error: Exception) -> str:
    """A text that says where the traceback was written; empty when it could not be written."""
    text = "".join(traceback.format_exception(error))
    for folder in (tempfile.gettempdir(), "."):
        file = Path(folder) / f"fedsim-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        with contextlib.suppress(OSError):
            file.write_text(f"{' '.join(sys.argv)}\n{text}", encoding="utf-8", errors="backslashreplace")
            return f"; traceback in {file}"
    return ""


def complain(text: str, code: int) -> int:
    """Write what is wrong to the standard error, if there is one; returns the exit code."""
    with contextlib.suppress(OSError, ValueError):
        print(f"fedsim: {printable(text)}", file=sys.stderr, flush=True)
    return code


def leave(code: object) -> NoReturn:
    """End this process with the exit code of a SystemExit, once all threads have ended and all exit functions have run.

    Python's own end would clear every module in addition: 0.3 s after an import of PyTorch. Triton would print a page
    about its objects.
    """
    if isinstance(code, str):
        code = complain(code, 1)
    with contextlib.suppress(KeyboardInterrupt):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # it is closed, or there is none
            stream.flush()
    os._exit(code if isinstance(code, int) else 0)


def _flush(code: int) -> int:
    """Flush the standard output: only now an error of a full disk or a closed pipe becomes known."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _silence(sys.stdout)
        return code or 1
    except OSError as error:
        _silence(sys.stdout)
        return code or complain(f"cannot write to the standard output: {error.strerror}", 2)
    return code


def _silence(stream: TextIO) -> None:
    """Redirect the stream to nowhere, because the interpreter's own flush at its end would cause a second error."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def _any_encoding() -> Iterator[None]:
    """Write characters that a terminal or a file cannot encode as escapes: `±` in ASCII, names that are not UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    yield


def refuse_hidden_packages() -> None:
    """Raise UserError when a folder of the user hides one of our packages.

    This can happen because Python may search the working folder first.
    """
    home = Path(__file__).resolve().parents[2]
    for name in OWN_PACKAGES:
        spec = importlib.util.find_spec(name)
        if not spec:
            raise UserError(f"the package {name!r} of fedsim is missing next to {home / 'fedsim'}; install it again")
        places = [Path(place).resolve() for place in spec.submodule_search_locations or [spec.origin or ""]]
        if home / name not in places:
            raise UserError(
                f"{places[0]} hides the package {name!r} of fedsim, which is {home / name}; rename the first, or "
                "start in another folder"
            )
