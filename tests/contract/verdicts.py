"""What fedsim says to every combination: `python tests/contract/verdicts.py write FILE`, or `compare FILE`.

The file holds, as JSON, the sentence that refuses each combination, and an empty text for each that is accepted:

- `a+b` of all rows, in both orders
- `row < slot.part`: every row with every shipped part, which replaces the part of its slot or joins the list
- `row with part.field = value`: every row with another value of a switch or a choice of one of its parts
- `row on backbone, data set`: the network of every row on every backbone, for classes and for masks

`compare` prints what differs from a file that an older version wrote, and says which of it is another verdict.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import torch

from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_net, build_recipe
from fedsim.methods.recipe import LIST_SLOTS, Recipe
from fedsim.methods.registry import parts_by_slot
from fedsim.methods.table import METHODS
from fedsim.models.backbones import BACKBONES
from fedsim.parts.part import part_name
from fedsim.settings.experiment import Experiment

DATA = {"digits": {"dataset": "digits"}, "digit-masks": {"dataset": "digit-masks"}}


def verdict(method: dict, data: dict | None = None, model: dict | None = None) -> str:
    """The sentence that refuses a recipe or, where a model is given, its network; empty: it is accepted."""
    try:
        experiment = Experiment(method=method, data=data or {}, model=model or {}, run={"update_limit": 0})
        recipe = build_recipe(experiment)
        if model:
            network(experiment, recipe)
    except UserError as error:
        return str(error)
    except ValueError as error:
        return f"settings: {error}"
    return ""


_NETWORKS: dict[tuple, str] = {}


def network(experiment: Experiment, recipe: Recipe) -> None:
    """Raise UserError where the network is refused; built without memory, and once for what decides about it."""
    row = experiment.method_name
    kinds = (recipe.norm, recipe.inserts, type(recipe.client), type(recipe.objective), type(recipe.fuse))
    key = (*kinds, experiment.model.backbone, experiment.data.dataset)
    if key not in _NETWORKS:
        try:
            with torch.device("meta"):
                build_net(experiment, recipe)
            _NETWORKS[key] = ""
        except UserError as error:
            _NETWORKS[key] = str(error).replace(row, "ROW")
    if _NETWORKS[key]:
        raise UserError(_NETWORKS[key].replace("ROW", row))


def verdicts() -> Iterator[tuple[str, str]]:
    """(combination, sentence) of all combinations."""
    for a in METHODS:
        for b in METHODS:
            if a != b:
                yield f"{a}+{b}", verdict({"name": f"{a}+{b}"})
    for slot, kinds in parts_by_slot().items():
        key = "add" if slot in LIST_SLOTS else slot
        for part in kinds:
            for row in METHODS:
                value = [part] if slot in LIST_SLOTS else part
                yield f"{row} < {slot}.{part}", verdict({"name": row, key: value})
    for row, recipe in METHODS.items():
        for part, field, value in choices(recipe):
            yield f"{row} with {part}.{field} = {value}", verdict({"name": row, part: {field: value}})
    for name, data in DATA.items():
        for backbone, kind in BACKBONES.items():
            size = {"image_size": 64} if kind.maps else {}
            for row in METHODS:
                yield f"{row} on {backbone}, {name}", verdict({"name": row}, data | size, {"backbone": backbone})


def choices(recipe: Recipe) -> Iterator[tuple[str, str, object]]:
    """(part, field, value) of every value of the switches and choices that the parts of a row have."""
    for _, part in recipe.pairs:
        for field, hint in get_type_hints(type(part)).items():
            values = (False, True) if hint is bool else get_args(hint) if get_origin(hint) is Literal else ()
            yield from ((part_name(part), field, value) for value in values)


def compare(old: dict[str, str], new: dict[str, str]) -> int:
    """Print what differs; 1 where a combination is accepted in one and refused in the other."""
    turned = [key for key in old if key in new and bool(old[key]) != bool(new[key])]
    for key in turned:
        print(f"VERDICT {key}: {old[key] or 'accepted'} -> {new[key] or 'accepted'}")
    worded = Counter(
        (old[key].rpartition(": ")[2], new[key].rpartition(": ")[2])
        for key in old
        if new.get(key, old[key]) != old[key] and key not in turned
    )
    for (before, after), count in worded.items():
        print(f"sentence ({count}): {before}\n    -> {after}")
    gone, more = old.keys() - new.keys(), new.keys() - old.keys()
    print(f"{len(new)} combinations, {sum(map(bool, new.values()))} refused; {len(turned)} other verdicts, "
          f"{len(worded)} other sentences, {len(gone)} gone, {len(more)} new")  # fmt: skip
    return bool(turned)


if __name__ == "__main__":
    found = dict(verdicts())
    if sys.argv[1] == "write":
        Path(sys.argv[2]).write_text(json.dumps(found, indent=0), encoding="utf-8")
        print(f"{len(found)} combinations, {sum(map(bool, found.values()))} refused")
    else:
        sys.exit(compare(json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")), found))
