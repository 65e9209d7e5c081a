"""Names of domains and classes as people, file systems and papers spell them."""

import re
import unicodedata
from collections.abc import Iterable


def composed(name: str) -> str:
    """A name in Unicode's composed form (NFC): "é" is one sign, whichever way a file system stores it."""
    return unicodedata.normalize("NFC", name)


def plain(name: str) -> str:
    """Spelling-free form of a benchmark's name: "Real World", "Real_World" and "real-world" are one.

    Only blanks, separators and case are left out; no letter is.
    """
    return re.sub(r"[\s_\-]+", "", composed(name).casefold()) or name


def same(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that is the same name, in whatever Unicode form; None when there is none."""
    known = list(known)
    if name in known:
        return name
    return next((candidate for candidate in known if composed(candidate) == composed(name)), None)


def matching(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that equals `name`, exactly or else up to spelling; None when there is none or several."""
    known = list(known)
    exact = same(name, known)
    if exact is not None:
        return exact
    alike = [candidate for candidate in known if plain(candidate) == plain(name)]
    return alike[0] if len(alike) == 1 else None
