"""The one exception that means «the user can mend this»: printed as one line, exit code 2."""

import difflib
from typing import Any


class UserError(ValueError):
    """Bad input: what is wrong, where, and what to do, in one line and without a traceback."""


class ClientFailedError(RuntimeError):
    """A client did not deliver; the message names its domain and carries the client's own traceback."""


USER_ERROR = "user error: "  # prefix of an error reply that means «the user can mend this»


def nearest(name: str, known: Any) -> str:
    """`"did you mean 'fedavg'? "` for a near miss, else an empty string; for one-line errors."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {match[0]!r}? " if match else ""
