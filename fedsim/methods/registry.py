"""Every part that a setting can name, by slot: the classes in the slots' folders, and those that the rows use.

A new part is known as soon as its file is in the folder of its slot; there is no list to keep.
"""

import dataclasses
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from fedsim.common.errors import UserError
from fedsim.methods.groups import answer_for
from fedsim.methods.recipe import LIST_SLOTS, SLOTS, Recipe, slots_of
from fedsim.methods.table import METHODS
from fedsim.models.backbones import is_family
from fedsim.parts.part import part_name, unfit
from fedsim.settings.experiment import Experiment
from fedsim.settings.plugins import Package, entry_points, instance, is_outside, lookup, required_packages

FOLDERS = {
    "share": "strategies.share",
    "compress": "strategies.compress",
    "weights": "strategies.weights",
    "fuse": "strategies.fuse",
    "banks": "strategies.banks",
    "refine": "strategies.refine",
    "visits": "strategies.visits",
    "objective": "clients.objective",
    "update": "clients.update",
    "companions": "clients.companions",
    "step": "clients.step",
    "terms": "clients.terms",
    "batches": "clients.batches",
    "augment": "clients.augment",
    "reports": "clients.reports",
    "unlabelled": "clients.unlabelled",
    "norm": "fedsim.models.norms",
    "inserts": "fedsim.models.inserts",
    "infer": "fedsim.models.infer",
}
Kinds = Mapping[str, dict[str, type]]  # {slot: {settings name: class}}

# Recipes that Python code of this process gave as objects, by the name that settings have for them.
GIVEN: dict[str, Recipe] = {}


@functools.cache
def shipped_parts() -> tuple[type, ...]:
    """The part classes that the modules of all slots' folders define."""
    kinds: dict[type, None] = {}
    for folder in FOLDERS.values():
        package = importlib.import_module(folder)
        for file in pkgutil.iter_modules(package.__path__, folder + "."):
            module = importlib.import_module(file.name)
            kinds |= dict.fromkeys(kind for kind in vars(module).values() if _is_own_part(kind, module.__name__))
    return tuple(kinds)


def is_shipped(kind: type) -> bool:
    """Whether a part's class is of a module in a slot's folder. Unlike `shipped_parts` it imports no module."""
    return kind.__module__.rpartition(".")[0] in FOLDERS.values()


def _is_own_part(kind: object, module: str) -> bool:
    """Whether a module's value is a part that this module defines, and not an imported one or a contract."""
    return (
        isinstance(kind, type) and kind.__module__ == module and dataclasses.is_dataclass(kind) and bool(slots_of(kind))
    )


_latest: list[tuple[tuple[Recipe, ...], Kinds]] = []  # what `parts_of_rows` made of which rows


def parts_by_slot() -> Kinds:
    """{slot: {settings name: class}} of every shipped part and of every part in a row of METHODS."""
    shipped = shipped_parts()
    return {slot: _of_slot(shipped, slot) | kinds for slot, kinds in parts_of_rows().items()}


def parts_of_rows() -> Kinds:
    """{slot: {settings name: class}} of the parts in the rows of METHODS, whose modules are imported already.

    It is made anew only when a row has changed, because the plan of a run asks for it some thirty times.
    """
    rows = tuple(METHODS.values())
    if not _latest or _latest[0][0] != rows:  # equal objects are compared by their identity, which is quick
        kinds = dict.fromkeys(type(part) for row in rows for _, part in row.pairs)
        _latest[:] = [(rows, {slot: _of_slot(kinds, slot) for slot in SLOTS})]
    return _latest[0][1]


def _of_slot(kinds: Iterable[type], slot: str) -> dict[str, type]:
    """{settings name: class} of those of the classes that are for a slot."""
    return {part_name(kind): kind for kind in kinds if slot in slots_of(kind)}


def _in_slot(by_slot: Kinds, slot: str) -> dict[str, type]:
    """{settings name: class} of one slot, or of all where none is named."""
    by_name: dict[str, type] = {}
    for key, kinds in by_slot.items():
        by_name |= kinds if slot in ("", key) else {}
    return by_name


def one_line(kind: type) -> str:
    """What a part does, or its formula: the first paragraph of its docstring on one line."""
    return " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())


def find_part(name: object, slot: str = "") -> type:
    """The class of a part by its settings name or as `module:Class`, in one slot or in any.

    Raises UserError, with the most similar known name, when there is no such part, or when it is not for that slot.
    """
    text = name if isinstance(name, str) else repr(name)
    by_name = _in_slot(parts_of_rows(), slot)
    if text not in by_name:  # most names are of a row's part, and all others ask for the modules of all parts
        by_name = _in_slot(parts_by_slot(), slot)
    where = f"method.{slot}: no part" if slot else "method: no part"
    kind = lookup(text, by_name, "parts", where)
    if not isinstance(kind, type) or not slots_of(kind) or not dataclasses.is_dataclass(kind):
        hint = "a part is a dataclass that derives from a slot's contract (docs/own-method.md)"
        raise UserError(f"{where} {name!r}: {hint}")
    if slot and slot not in slots_of(kind):
        raise UserError(f"{where} {name!r}: it is for {', '.join(slots_of(kind))}")
    return kind


def find_row(name: str) -> Recipe:
    """A row of METHODS, of an installed package, or `module:name`.

    A UserError says what a method of another benchmark is called here or why it is not here, or gives the most similar
    known name.
    """
    rows = GIVEN if name in GIVEN else METHODS
    known = name in rows or name in entry_points("methods") or ":" in name
    if not known and (answer := answer_for(name, [*METHODS])):
        raise UserError(f"unknown method {name!r}: {answer}")
    recipe = instance(lookup(name, rows, "methods", "unknown method"), Recipe, f"method {name!r}")
    return dataclasses.replace(recipe, **{slot: _fitting(recipe, slot, f"method {name!r}: {slot}") for slot in SLOTS})


def _fitting(recipe: Recipe, slot: str, where: str) -> object:
    """What a row has in a slot, a list as a tuple; UserError for anything but parts of that slot."""
    value = getattr(recipe, slot)
    if slot not in LIST_SLOTS and value is None and getattr(Recipe(), slot) is None:
        return None
    if slot in LIST_SLOTS and not isinstance(value, list | tuple):
        raise UserError(f"{where} takes a tuple of parts, and the row has {_shown(value)}; write ({_shown(value)},)")
    parts = tuple(value) if slot in LIST_SLOTS else (value,)
    for part in parts:
        if isinstance(part, type) and slots_of(part):
            raise UserError(f"{where} has the class {part.__name__} where a part is needed; write {part.__name__}()")
        if not isinstance(part, SLOTS[slot]):
            kind: type = type(part)
            hint = f"it is for {', '.join(slots_of(kind))}" if slots_of(kind) else "it is no part"
            raise UserError(f"{where} has {_shown(part)}, which does not fit; {hint}")
        if reason := unfit(part):
            raise UserError(f"{where}: {reason}")
    return parts if slot in LIST_SLOTS else value


def _shown(value: object) -> str:
    """A part as a row writes it, without its fields; the name of any other class."""
    kind: type = type(value)
    return f"{kind.__name__}()" if slots_of(kind) else kind.__name__


def packages_of(experiment: Experiment) -> list[Package]:
    """The packages that every machine of a run (server, worker or deployed site) needs in addition to fedsim."""
    return required_packages(_named(experiment))


def outside(experiment: Experiment) -> list[str]:
    """Each `module:name` outside fedsim that an experiment names, and whose module is imported to read a run of it.

    A plain name of an entry point is none: the user has installed its package for fedsim. Callbacks are imported only
    for training.
    """
    names = (name for group, name in _named(experiment) if not (group == "backbones" and is_family(name)))
    return list(dict.fromkeys(filter(is_outside, names)))


def refuse_outside(experiment: Experiment, where: str | Path, trust: bool) -> None:
    """UserError when an experiment that somebody else may have written names modules outside fedsim, without trust."""
    if (names := outside(experiment)) and not trust:
        raise UserError(f"{where} names modules outside fedsim: {', '.join(names)}; their code would run with your "
                        "rights: add --trust (in Python trust=True) if you trust who wrote them")  # fmt: skip


def _named(experiment: Experiment) -> list[tuple[str, str]]:
    """(group of entry points, name) of everything that an experiment may take from a module."""
    method = experiment.method
    parts = [value for key, value in method.items() if key == "add" or key in SLOTS]
    names = [word for value in parts for word in (value if isinstance(value, list) else [value])]
    names += [key for key in method if ":" in key]  # no part of a method, which is refused after it was looked for
    return [
        *(("methods", word) for word in experiment.method_name.split("+")),
        *(("parts", word) for word in [*names, *experiment.parts] if isinstance(word, str)),
        ("datasets", experiment.data.dataset),
        ("backbones", experiment.model.backbone),
        ("augmentations", experiment.data.augment),
    ]
