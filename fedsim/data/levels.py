"""What the levels of folders below a data root are: data.levels, such as 'domain/class' or 'domain/*/class'.

A level is the domain's, the class's, one that is neither and whose folders are read together (*), or one of which a
folder alone is read, by its name. Whatever lies below the last level belongs to its class.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from fedsim.common.errors import UserError
from fedsim.data.findings import Finding, joined_names
from fedsim.data.names import composed, names_in, same, subfolders
from fedsim.settings import DataSettings

USUAL = ("domain", "class")
ANY = "*"
LEAST_NAMES = 2  # that all folders share, where a level looks like that of the classes
# What is taken out of names, to see whether they differ in the part of a split only.
PART_OF_SPLIT = re.compile(
    r"(?<![^\W\d_])(?:train(?:ing)?|(?:cross)?val(?:id(?:ation)?)?|test(?:ing)?|dev|holdout)(?![^\W\d_])"
    r"|(?<![^\W\d_])(?:fold|split)[\W_]*\d+"
)
Tree = dict[str, dict[str, list[str]]]  # {domain: {class: its folders, as seen from the root}}


def levels_of(data: DataSettings) -> tuple[str, ...]:
    """The levels that the settings name, from the root on; UserError unless both of `USUAL` are there, once each."""
    levels = tuple(data.levels.split("/")) if data.levels else USUAL
    has_both = all(levels.count(name) == 1 for name in USUAL)
    if not has_both or not all(levels):
        raise UserError(
            f"data.levels = {data.levels!r} must have domain and class once each, between them / and for other levels "
            "* or a folder's name, such as 'domain/*/class'"
        )
    return levels


def tree_of(root: Path, levels: tuple[str, ...]) -> Tree:
    """The folders of every domain and class below the root; a domain without any class folder has none."""
    tree: Tree = {}
    _descend(root, levels, {}, "", tree)
    return tree


def _descend(root: Path, levels: tuple[str, ...], names: Mapping[str, str], below: str, tree: Tree) -> None:
    """Enters the folders below `below` into the tree; names: of the levels above, where these are of `USUAL`."""
    if "domain" in names:
        classes = tree.setdefault(names["domain"], {})
        if not levels:
            classes.setdefault(names["class"], []).append(below)
    if not levels:
        return
    level, *deeper = levels
    folder = root / below
    is_named = level not in (ANY, *USUAL)
    if level in USUAL:
        names_in(folder)  # refuses two names that are one in Unicode
    for sub in subfolders(folder):
        if is_named and same(level, [sub]) is None:
            continue
        names_below = dict(names)
        if level in USUAL:
            names_below[level] = composed(sub)
        _descend(root, tuple(deeper), names_below, str(Path(below, sub)), tree)


def refuse_unclear_levels(root: Path, data: DataSettings) -> None:
    """Raises UserError where a level may be neither domain nor class, and no setting says what it is.

    That is so where the third level has the same folders everywhere, as that of the classes has. With data.group =
    "folder" the third level is that of the groups.
    """
    if data.levels or data.group:
        return
    tree = tree_of(root, USUAL)
    names: set[str] | None = None
    for classes in tree.values():
        for folders in classes.values():
            inside = _folders_alone(root / folders[0])
            names = inside if names is None else names & inside
            if len(names) < LEAST_NAMES:
                return
    seconds = sorted(set().union(*tree.values()))
    if not names or len(tree) * len(seconds) < LEAST_NAMES:
        return
    first, second, third = (joined_names(sorted(level)) for level in (tree, seconds, names))
    complete = _complete(root, tree)
    raise UserError(
        f"{root}: the folders of the third level have the same names everywhere ({third}), as those of classes have, "
        "so that a level may be neither domain nor class; data.levels says which reading holds: "
        f"'domain/*/class' (domains {first}; classes {third}; {second} read together), "
        f"'*/domain/class' (domains {second}; classes {third}; {first} read together), or "
        f"'domain/class' (domains {first}; classes {second}). A folder's name in place of * reads it alone{complete}"
    )


def _folders_alone(folder: Path) -> set[str]:
    """The names of the folders in a folder that holds no file next to them; empty where it holds files."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(".") and entry.is_file():
                return set()
    return set(map(composed, subfolders(folder)))


def _complete(root: Path, tree: Tree) -> str:
    """A hint where one folder of the second level has all the files that the others of its domain have together."""
    domain, classes = next(iter(tree.items()))
    files = {name: _files_below(root / folders[0]) for name, folders in classes.items()}
    for name, inside in files.items():
        others = [files[other] for other in files if other != name]
        together = set().union(*others)
        has_all = together and together <= inside
        is_copied = any(inside <= other for other in others)
        if has_all and not is_copied:
            return f": {name!r} has the files of all others in {domain!r}, so that 'domain/{name}/class' has each once"
    return ""


def _files_below(folder: Path) -> set[str]:
    """The paths of the files below a folder, as seen from it."""
    paths = set()
    for parent, _, names in os.walk(folder):
        for name in names:
            paths.add(os.path.relpath(Path(parent, name), folder))
    return paths


def split_domains(domains: Iterable[str], where: object, remedy: str) -> list[Finding]:
    """A finding where domains differ in the part of a split only, such as train and test, or lyon_train and lyon_val.

    The unseen domain would then be a part of the same data. remedy: what can be done about it, a clause
    """
    alike: dict[str, list[str]] = {}
    for name in domains:
        rest, parts = PART_OF_SPLIT.subn("", name.casefold())
        if parts:
            alike.setdefault(re.sub(r"[\W_]+", "", rest), []).append(name)
    findings = []
    for names in alike.values():
        if len(names) < LEAST_NAMES:
            continue
        shown = f"the domains {joined_names(names)} are called like parts of one split"
        finding = Finding(
            kind="split-domains",
            where=str(where),
            count=len(names),
            text=f"{where}: {shown}, so that an unseen one would be data of a domain that trains",
            remedy=remedy,
            is_grave=True,
        )
        findings.append(finding)
    return findings
