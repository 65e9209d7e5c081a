"""Where in a user's own file something is: `supcon.py:24, in weigh`."""

import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parents[2]
OURS = tuple(f"{HOME / name}/" for name in ("fedsim", "clients", "strategies"))  # the packages of fedsim
LIBRARIES = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib"))


def is_own(function: Callable[..., Any]) -> bool:
    """Whether a function is in one of fedsim's own files; also for what is no Python function."""
    code = getattr(function, "__code__", None)
    return code is None or code.co_filename.startswith(OURS)


def place_of(function: Callable[..., Any]) -> str:
    """File, first line and name of a Python function."""
    code = function.__code__
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}, in {code.co_name}"


def place_of_error(error: BaseException) -> str:
    """File, line and function of the last line of a user's own file that fedsim has called; empty: there is none."""
    place, called = "", False
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith(OURS):
            called = True
        elif called and frame.filename.endswith(".py") and not frame.filename.startswith(LIBRARIES):
            place = f"{Path(frame.filename).name}:{frame.lineno}, in {frame.name}"
    return place
