"""Names of domains and classes, which people, file systems and papers spell differently."""

import itertools
import re
import unicodedata
from collections.abc import Collection, Iterable
from pathlib import Path

from fedsim.common.errors import UserError

# How folders begin that hold neither a domain nor a class. `__background__` is a class.
HIDDEN = (".", "__MACOSX", "__pycache__", "@eaDir")


def composed(name: str) -> str:
    """A name in Unicode's composed form (NFC): "é" is one character, however a file system stores it."""
    return unicodedata.normalize("NFC", name)


def plain(name: str) -> str:
    """A name without differences of spelling: "Real World", "Real_World" and "real-world" are one.

    Only blanks, separators and case are removed; no letter is.
    """
    return re.sub(r"[\s_\-]+", "", composed(name).casefold()) or name


def same(name: str, candidates: Iterable[str]) -> str | None:
    """The one of the candidates that is the same name in any Unicode form; None when there is none."""
    candidates = list(candidates)
    if name in candidates:
        return name
    for candidate in candidates:
        if composed(candidate) == composed(name):
            return candidate
    return None


def matching(name: str, candidates: Iterable[str]) -> str | None:
    """The one of the candidates that equals `name`, exactly or else except for spelling; None for none or several."""
    candidates = list(candidates)
    exact = same(name, candidates)
    if exact is not None:
        return exact
    alike = [candidate for candidate in candidates if plain(candidate) == plain(name)]
    if len(alike) != 1:
        return None
    return alike[0]


def refuse_repeated(names: Iterable[str], where: str) -> None:
    """UserError when a list of the settings has a name twice, in one Unicode form or in two."""
    seen: set[str] = set()
    for name in map(composed, names):
        if name in seen:
            raise UserError(f"{where} has {name!r} twice; write each name once")
        seen.add(name)


def used_of(domains: Iterable[str], asked: Iterable[str]) -> list[str]:
    """The known domains that are asked for; all of them when none is, or when one is not known, which is said later."""
    domains = list(domains)
    named = set(map(composed, asked))
    if not named or not named <= set(domains):
        return domains
    return [name for name in domains if name in named]


def refuse_alike(groups: Iterable[Collection[str]], what: str, where: object) -> None:
    """UserError when two names differ in blanks, separators or case only: then one name was spelled in two ways.

    Names that one of the groups (the classes of a domain) has side by side are meant to be two.
    """
    sets = [set(group) for group in groups]
    alike: dict[str, list[str]] = {}
    for name in sorted(set().union(*sets)):
        alike.setdefault(plain(name), []).append(name)
    for names in alike.values():
        for one, other in itertools.combinations(names, 2):
            are_two = any({one, other} <= group for group in sets)
            if not are_two:
                raise UserError(f"{where}: the {what} {one!r} and {other!r} differ in spelling only; make them equal")


def read_from(path: Path) -> str:
    """Where a path that is not there was looked for, to follow its name in a message; empty for an absolute path."""
    if path.is_absolute():
        return ""
    return f" in {Path.cwd()}, the folder in which fedsim was started"


def subfolders(folder: Path) -> list[str]:
    """Sorted names of the visible folders in a folder."""
    try:
        names = [path.name for path in folder.iterdir() if path.is_dir()]
        return sorted(name for name in names if not name.startswith(HIDDEN))
    except OSError as error:
        where = f"{folder}{read_from(folder)}"
        raise UserError(f"cannot read the folder {where}: {error.strerror}; set data.root or $FEDSIM_DATA") from None


def names_in(folder: Path) -> list[str]:
    """Sorted names of the visible folders in a folder, in Unicode's composed form."""
    folders = subfolders(folder)
    names = sorted(map(composed, folders))
    for name, following in zip(names, [*names[1:], ""]):
        if name == following:
            raise UserError(f"{folder}: two folders have the name {name!r}, in two Unicode forms; rename one of them")
        if not name.isprintable():
            raise UserError(f"{folder}: the folder name {name!r} is not text in UTF-8; rename it")
    return names
