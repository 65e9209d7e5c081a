"""Methods, parts, data sets, backbones, augmentations and callbacks from a user's own modules or from other packages.

They are named as `package.module:name`, or by the plain name of an entry point of an installed package:

    [project.entry-points."fedsim.methods"]
    moon = "mymethods:moon"

A module is searched in Python's own folders, then in the folders of $FEDSIM_PLUGINS, then in the working folder. Its
code has the rights of the user who runs fedsim: name only code that you trust.
"""

import functools
import hashlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from inspect import signature
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, get_type_hints

from fedsim.common.errors import UserError, nearest
from fedsim.common.user_code import place_of_error

GROUPS = ("methods", "parts", "datasets", "backbones", "augmentations")  # entry points fedsim.methods, ...
FOLDERS_VARIABLE = "FEDSIM_PLUGINS"
HASH = "sha256:"  # stands before the hash of a module that has no version
OWN = ("fedsim", "strategies", "clients")  # the packages of fedsim
LISTINGS = {"methods": "fedsim methods", "datasets": "fedsim datasets"}  # the command that prints all names
WAYS_OUT = {  # what to do with an object of one's own that is not of the kind
    "Backbone": "name the class of the network, or a function that says it returns one: `def net() -> Net:`",
    "Benchmark": "name a mapping {domain: Dataset}",
}


@dataclass(frozen=True)
class Package:
    """The package that a plugin's name needs on every machine that runs it.

    distribution and version are empty when no installed package contains the module, such as for a file in a folder.
    """

    module: str
    distribution: str
    version: str

    @property
    def requirement(self) -> str:
        """`mymethods==1.2`, as pip accepts it; the module's name when no package contains it."""
        return f"{self.distribution}=={self.version}" if self.distribution else self.module


def lookup(name: str, known: Mapping[str, Any], group: str, where: str) -> Any:
    """The object of that name: a known one, one of an entry point, or the object that `module:name` names.

    A UserError begins with `where` and gives the most similar known name. It is also raised when the name is known and
    an installed package offers the same one, because either could be meant.
    """
    if ":" in name:
        return load(name, where)
    points = entry_points(group)
    offered = [*(["fedsim's own"] if name in known else []), *points.get(name, ())]
    if len(offered) > 1:
        raise UserError(f"the {group[:-1]} {name!r} could be {' or '.join(offered)}, of an installed package; write "
                        "the one with a colon that you mean, or uninstall the package")  # fmt: skip
    if name in known:
        return known[name]
    if name in points:
        return load(points[name][0], where)
    if name.isidentifier() and any((Path(folder) / f"{name}.py").is_file() for folder in search_folders()):
        raise UserError(f"{where} {name!r}; for an object of {name}.py write {name}:NAME, where NAME is its name there")
    names = [*known, *points]
    near = nearest(name, names)
    if near and group in LISTINGS:
        raise UserError(f"{where} {name!r}; {near}all names: {LISTINGS[group]}")
    raise UserError(f"{where} {name!r}; {near}known: {', '.join(names)}, or module:name of your own")


@functools.cache
def entry_points(group: str) -> dict[str, list[str]]:
    """{plain name: every "module:name" that installed packages offer for it}."""
    offered: dict[str, set[str]] = {}
    for point in installed_points().select(group=f"fedsim.{group}"):
        offered.setdefault(point.name, set()).add(point.value)
    return {name: sorted(offered[name]) for name in sorted(offered)}


@functools.cache  # one pass through the metadata of all packages, which takes tens of milliseconds, for all groups
def installed_points() -> metadata.EntryPoints:
    """The entry points of all installed packages."""
    return metadata.entry_points()


@functools.cache  # it reads the records of all packages, too
def installed_packages() -> Mapping[str, list[str]]:
    """{module: the installed packages that contain it}."""
    return metadata.packages_distributions()


def load(reference: str, where: str) -> Any:
    """The object that `package.module:name` names; UserError when there is no such module, or no such name in it."""
    module, _, attribute = reference.partition(":")
    if not all(name.isidentifier() for name in (*module.split("."), attribute)):  # none of them is a path
        raise UserError(f"{where} {reference!r} is not of the form package.module:name")
    for folder in search_folders() if is_outside(reference) else ():
        if folder not in sys.path:  # as for the `fedsim` script, which does not search the working folder
            sys.path.append(folder)
    try:
        named = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        raise UserError(f"{where} {reference!r}: {error}; install it, or start in the folder that holds it") from None
    except UserError:
        raise
    except Exception as error:  # the module's own code may raise any error
        place = place_of_error(error)
        raise UserError(
            f"{where} {reference!r}: importing {module} failed: {type(error).__name__}: {error}"
            f"{f' ({place})' if place else ''}{_nearest_argument(error)}"
        ) from error
    if named is None:
        names = [key for key, value in vars(sys.modules[module]).items() if not isinstance(value, ModuleType)]
        raise UserError(
            f"{where} {reference!r}: {module} has no {attribute!r}; {nearest(attribute, names)}".rstrip("; ")
        )
    return named


def _nearest_argument(error: Exception) -> str:
    """What to say where a class was called with an argument that it does not have; empty for any other error."""
    called = re.match(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    kind = frames[-1].f_globals.get(called[1]) if called else None
    return f"; {nearest(called[2], signature(kind).parameters)}".rstrip("; ") if called and kind else ""


def is_outside(name: str) -> bool:
    """Whether a name is `module:name` of a module that is not fedsim's own."""
    module, colon, _ = name.partition(":")
    return bool(colon) and module.partition(".")[0] not in OWN


def search_folders() -> list[str]:
    """The folders, in addition to Python's own, in which the module of a plugin is searched."""
    named = [folder for folder in os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep) if folder]
    return list(dict.fromkeys([*(str(Path(folder).resolve()) for folder in named), str(Path.cwd())]))


def required_packages(names: Iterable[tuple[str, str]]) -> list[Package]:
    """The packages from which the (group, name) pairs come; fedsim's own names need no package."""
    references = [entry_points(group).get(name, [name])[0] for group, name in names]
    return [package_of(reference) for reference in dict.fromkeys(references) if ":" in reference]


def package_of(reference: str) -> Package:
    """The installed package that contains the module of `module:name`."""
    module = reference.partition(":")[0]
    holders = installed_packages().get(module.partition(".")[0], [])
    if not holders:
        return Package(module, "", "")
    return Package(module, holders[0], metadata.version(holders[0]))


def outside_versions(packages: Iterable[Package]) -> dict[str, str]:
    """{package: version}; for a module that no package contains, the hash of its source instead."""
    return {each.distribution or each.module: each.version or _source_hash(each.module) for each in packages}


def _source_hash(module: str) -> str:
    """A short hash of the module's file, or of all Python files of the folder that it is in as `folder.module`."""
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except ValueError:  # the module of a script or a notebook has none
        spec = None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.py"))
    if spec and not folders and spec.origin:
        files = [Path(spec.origin)]
    texts = [file.read_bytes().replace(b"\r\n", b"\n") for file in files]
    return f"{HASH}{hashlib.sha256(b''.join(texts)).hexdigest()[:12]}" if texts else ""


def origin(group: str, name: str) -> str:
    """Where a plain name comes from: fedsim, or the package of its entry point."""
    points = entry_points(group).get(name)
    return package_of(points[0]).requirement if points else "fedsim"


def instance(found: Any, kind: type, where: str) -> Any:
    """`found` itself, or what it makes without arguments; UserError when this is not an instance of `kind`.

    Nothing is called that does not say beforehand that it makes one; see `makes`.
    """
    if isinstance(found, kind) and not isinstance(found, type):
        return found
    if not makes(found, kind):
        raise UserError(f"{where} is {_in_words(found, kind)}")
    made = called(found, where)
    if not isinstance(made, kind):
        raise UserError(f"{where} is {type(made).__name__}, not a {kind.__name__}")
    return made


def makes(found: object, kind: type) -> bool:
    """Whether `found` is a class that derives from `kind`, or a function that is declared to return one.

    A call may do anything, so that this is known before it: `def small() -> Backbone:`.
    """
    made = found if isinstance(found, type) else declared(found)
    return made is not None and issubclass(made, kind)


def declared(found: object) -> type | None:
    """The class that a function says it returns, by the annotation behind `->`; None where it says none."""
    try:
        returned = get_type_hints(found).get("return")
    except Exception:  # an object that has no annotations, or annotations that name what is not there
        return None
    return returned if isinstance(returned, type) else None


def called(found: Any, where: str) -> Any:
    """The result of calling a user's class or function without arguments; UserError when this fails."""
    try:
        return found()
    except UserError:
        raise
    except Exception as error:  # the user's own code may raise any error
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(f"{where} cannot be called without arguments ({reason})") from error


def _in_words(found: object, kind: type) -> str:
    """What an object is that does not fit a slot, and what to write there."""
    if isinstance(found, type):
        return f"the class {found.__name__}, which does not derive from {kind.__name__}"
    if isinstance(found, FunctionType | BuiltinFunctionType):
        right = f"`def {found.__name__}() -> {kind.__name__}:`"
        return f"a function that does not say what it returns; if it makes one, write {right}"
    return f"{type(found).__name__}, not a {kind.__name__}; {WAYS_OUT.get(kind.__name__, '')}".rstrip("; ")
