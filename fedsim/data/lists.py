"""Published splits: text files that name a domain's training, validation and test images.

art_painting_train_kfold.txt     art_painting/dog/pic_001.jpg 1
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedsim.common.errors import UserError
from fedsim.data.folders import Listing
from fedsim.data.names import composed, plain
from fedsim.settings import DataSettings, data_root

# What a published split calls its parts. `id_val` and `id_test` are words of WILDS and of FedDG_Benchmark's lists.
PARTS = {
    "train": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "id_val": "validation",
    "test": "test",
    "id_test": "test",
}
WORDS = {
    "train": ("train",),
    "validation": ("crossval", "val"),
    "test": ("test",),
}


def reads_lists(data: DataSettings) -> bool:
    """Whether published lists, a table's split column or a data set's own splits say what trains and is tested."""
    return data.split == "lists" or data.test_split == "list"


def list_folder(data: DataSettings) -> Path:
    """Folder of the lists: `data.lists`, seen from the data root. UserError when it is not there."""
    folder = data_root(data) / data.lists
    if not data.lists or not folder.is_dir():
        named = f"no folder {folder}" if data.lists else "data.lists is empty"
        raise UserError(f"{named}; set data.lists to the folder of the split lists (DOMAIN_train*.txt and so on)")
    return folder


def list_file(data: DataSettings, domain: str, part: str) -> Path | None:
    """The file DOMAIN_train*.txt (DOMAIN_crossval*.txt or DOMAIN_val*.txt, DOMAIN_test*.txt); None without one."""
    files = sorted(list_folder(data).glob("*.txt"))
    for word in WORDS[part]:
        start = f"{domain}_{word}".casefold()
        matches = [file for file in files if composed(file.name).casefold().startswith(start)]
        if len(matches) > 1:
            raise UserError(f"{matches[0].parent}: several lists {domain}_{word}*.txt; keep one")
        if matches:
            return matches[0]
    return None


def text_of(file: Path) -> str:
    """A text file in UTF-8; UserError for one that cannot be read or that is in another encoding."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{file} is not text in UTF-8; save it in this encoding") from None


def listed(
    data: DataSettings,
    domain: str,
    part: str,
    listing: Listing,
    domains: Sequence[str] = (),
) -> np.ndarray | None:
    """Sorted indices into the listing of the images that a list names; None when there is no list.

    A line is a path, with or without a label. The label is not used: the class is that of the image's folder. The last
    parts of the path must name an image of the domain. UserError for a path that does not, for an image named twice,
    and for the folder of another one of all `domains`, whose images may be called alike.
    """
    file = list_file(data, domain, part)
    if file is None:
        return None
    index = {composed(name): position for position, name in enumerate(listing.files)}
    of_domain = {plain(domain), plain(listing.folder.name)}
    all_folders = {plain(other) for other in domains}
    lines: dict[int, int] = {}
    for number, line in enumerate(text_of(file).splitlines(), start=1):
        if not line.strip():
            continue
        path = _path_of(line.strip())
        place = f"{file}, line {number}: {path!r}"
        folders, position = _position_of(path, index)
        if position is None:
            raise UserError(f"{place} is none of the images of {domain} in {listing.folder}")
        if folders & all_folders and not folders & of_domain:
            raise UserError(f"{place} is an image of another domain than {domain}; correct it")
        if position in lines:
            raise UserError(f"{place} was named in line {lines[position]} already")
        lines[position] = number
    return np.array(sorted(lines), dtype=np.int64)


def _path_of(line: str) -> str:
    """The path in a line of a list, without the label that may follow it."""
    head, _, label = line.rpartition(" ")
    has_label = head and label.isdecimal()
    return composed(head.strip() if has_label else line)


def _position_of(path: str, index: Mapping[str, int]) -> tuple[set[str], int | None]:
    """(the folders of a path above the part that names an image, the image's position); None when no part does."""
    parts = path.replace("\\", "/").split("/")
    for start in range(len(parts)):
        name = "/".join(parts[start:])
        position = index.get(name)
        if position is not None:
            return {plain(folder) for folder in parts[:start]}, position
    return set(), None
