"""The errors of fedsim; UserError means that the user can correct something, and is printed as one line."""

import difflib
import unicodedata
from typing import Any


class UserError(ValueError):
    """Wrong input. Its text says in one line what is wrong, where, and what to do; no traceback is printed."""


class ClaimedError(UserError):
    """Another process writes the run's folder. A sweep passes over such a cell and looks at it again later."""


class PresetConflictError(UserError):
    """A preset does not fit one method; the other methods of a sweep are not affected."""


class ClientFailedError(RuntimeError):
    """A client failed. The text names its domain and contains the client's own traceback."""


USER_ERROR = "user error: "  # prefix of an error reply that the user can correct
CLIENT_APP_RAISED = 2  # Flower's error code for an exception in the client app


def printable(text: str) -> str:
    """The text without control characters and invisible ones, which a terminal would obey; line ends are kept.

    Texts of sites, of their libraries and of files that somebody else has written reach the terminal and what is made
    of records: none of them may move the cursor or set a title. They are cleaned where they go out, because there are
    few such places: the console (common/console.py), CSV, comparisons, cards, HTML and SVG.
    """
    if text.isprintable():
        return text
    lines = text.replace("\r\n", "\n").replace("\t", " ").split("\n")
    return "\n".join(line if line.isprintable() else "".join(filter(_is_shown, line)) for line in lines)


def _is_shown(sign: str) -> bool:
    return unicodedata.category(sign) not in ("Cc", "Cf", "Zl", "Zp")


def first_line(error: Exception, most: int = 120) -> str:
    """The first line of an error's text, or the name of its class where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


def nearest(name: str, known: Any) -> str:
    """A part of an error message: `"did you mean 'fedavg'? "` when a known name is similar, else an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {match[0]!r}? " if match else ""
