"""Every part that a setting can name, by slot: the classes of the slots' folders, and those that the rows use.

A new part is known as soon as its file lies in the folder of its slot; no list has to be kept.
"""

import dataclasses
import functools
import importlib
import pkgutil

from fedsim.errors import UserError
from fedsim.experiment import nearest
from fedsim.methods import METHODS
from fedsim.part import part_name
from fedsim.recipe import SLOTS, parts_of, slots_of

FOLDERS = {
    "share": "strategies.share",
    "weights": "strategies.weights",
    "fuse": "strategies.fuse",
    "banks": "strategies.banks",
    "refine": "strategies.refine",
    "client": "clients.step",
    "terms": "clients.terms",
    "batches": "clients.batches",
    "augment": "clients.augment",
    "reports": "clients.reports",
    "norm": "fedsim.models.norms",
    "inserts": "fedsim.models.inserts",
    "infer": "fedsim.models.infer",
}


@functools.cache
def shipped_parts() -> tuple[type, ...]:
    """The part classes that the modules of all slots' folders define."""
    found: dict[type, None] = {}
    for folder in FOLDERS.values():
        package = importlib.import_module(folder)
        for file in pkgutil.iter_modules(package.__path__, folder + "."):
            module = importlib.import_module(file.name)
            found |= dict.fromkeys(kind for kind in vars(module).values() if _is_own_part(kind, module.__name__))
    return tuple(found)


def _is_own_part(kind: object, module: str) -> bool:
    """Whether a module's value is a part that this module defines, and not an imported one or a contract."""
    return (
        isinstance(kind, type) and kind.__module__ == module and dataclasses.is_dataclass(kind) and bool(slots_of(kind))
    )


def parts_by_slot() -> dict[str, dict[str, type]]:
    """{slot: {settings name: class}} of every shipped part and of every part in a row of METHODS."""
    kinds = dict.fromkeys(shipped_parts())
    kinds |= dict.fromkeys(type(part) for recipe in METHODS.values() for _, part in parts_of(recipe))
    return {slot: {part_name(kind): kind for kind in kinds if slot in slots_of(kind)} for slot in SLOTS}


def find_part(name: object, slot: str = "") -> type:
    """The class of a part by its settings name, in one slot or in any; UserError with the nearest known name."""
    known: dict[str, type] = {}
    for key, kinds in parts_by_slot().items():
        known |= kinds if slot in ("", key) else {}
    if not isinstance(name, str) or name not in known:
        raise UserError(
            f"method{'.' + slot if slot else ''}: no part {name!r}; {nearest(str(name), known)}"
            f"known: {', '.join(known) or 'none'}"
        )
    return known[name]
