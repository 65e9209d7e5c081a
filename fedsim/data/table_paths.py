"""Why a path in a table names no file, and in which form the file would be there.

advice(Path("data"), "photos\\a.png")  ->  "it is there as 'photos/a.png': write / for \\ in the column"
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from fedsim.data.folders import is_image
from fedsim.settings.data import start_folder

ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
DRIVE = re.compile(r"^[A-Za-z]:/*")
LEVELS_UP = 3  # of the folders above the table's that are looked at


class Form(NamedTuple):
    """Another form of a path, and what was changed in it, in words."""

    path: str
    changes: tuple[str, ...] = ()

    def then(self, path: str, change: str) -> "Form":
        """The form after one more change; the same form where the change does nothing."""
        return Form(path, (*self.changes, change)) if path != self.path else self


def advice(folder: Path, path: str) -> str:
    """What to do about a path that names no file seen from the table's folder, a clause."""
    if ADDRESS.match(path):
        return "it is an address, and images are read from files: download them, and name the files"
    for form in _forms(folder, path):
        if form.changes and (folder / form.path).is_file():
            return f"it is there as {form.path!r}: {', '.join(form.changes)}"
    return "correct the path, which is read from the table's folder, or leave the row out"


def _forms(folder: Path, path: str) -> Iterator[Form]:
    """Forms in which a path might name a file, the likely ones first."""
    form = Form(path).then(path.replace("\\", "/"), "write / for \\")
    form = form.then(DRIVE.sub("", form.path), "leave out the drive")
    form = form.then(str(Path(form.path).expanduser()), "write the home folder for ~")
    for decoded in (form, form.then(unquote(form.path), "write signs for their % codes")):
        for placed in _placed(folder, decoded):
            yield placed
            yield from _completed(folder, placed)


def _placed(folder: Path, form: Form) -> Iterator[Form]:
    """The form as it is, without its first folders, and as seen from other folders."""
    yield form
    parts = Path(form.path).parts
    for count in range(1, len(parts)):
        shorter = os.path.join(*parts[count:])  # noqa: PTH118  a text, as it stands in the table
        first = os.path.join(*parts[:count])  # noqa: PTH118
        yield form.then(shorter, f"leave out {first!r} at the beginning")
    above = [folder.absolute().parents[level] for level in range(min(LEVELS_UP, len(folder.absolute().parents)))]
    below = sorted(each for each in folder.iterdir() if each.is_dir())
    for other in (start_folder(), *above, *below):
        seen = os.path.relpath(other / form.path, folder)
        yield form.then(seen, "it is read from the table's folder")


def _completed(folder: Path, form: Form) -> Iterator[Form]:
    """The form with the name of an image file in its folder, that has another ending or another case."""
    place = (folder / form.path).parent
    if not place.is_dir():
        return
    name = Path(form.path).name
    present = sorted(each.name for each in place.iterdir() if is_image(each.name))
    for other in present:
        changed = str(Path(form.path).with_name(other))
        if other.rpartition(".")[0] == name:
            yield form.then(changed, "add the ending of the name")
        elif other.casefold() == name.casefold():
            yield form.then(changed, "write capital and small letters as the file has them")
        elif other.rpartition(".")[0] == name.rpartition(".")[0]:
            yield form.then(changed, "the file has another ending")
