"""What a sweep varies: methods, targets, seeds and a grid. A setting that is given in two ways is an error."""

import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from fedsim.common.errors import UserError
from fedsim.settings.experiment import overlap, parse_override

# Settings that a sweep gives to its cells, and the options in which the user names their values.
OPTIONS = {"method.name": "--methods", "run.target": "--targets", "run.seed": "--seeds"}
# Settings of a whole sweep, which all its cells share.
SHARED = {"run.output": "--output", "run.label": "--set run.label=NAME", "name": "--set name=NAME"}


@dataclass(frozen=True)
class Axes:
    """What a sweep varies; `targets` may be `["all"]`, `grid` holds `key=v1,v2` or `key+other=v1+w1,v2+w2` words."""

    methods: Sequence[str]
    targets: Sequence[str]
    seeds: Sequence[int]
    grid: Sequence[str] = ()


def check_axes(axes: Axes, overrides: Sequence[str], preset: str = "") -> str:
    """The label that `--set run.label=...` gives to all cells; UserError for a setting that is given in two ways.

    Methods, targets and seeds are axes of the sweep itself; as an override or a grid key they would conflict with it.
    """
    for option, names in (("--methods", axes.methods), ("--targets", axes.targets)):
        if not all(names):  # an empty target would mean the default one
            raise UserError(f"{option}: a name is empty")
    fixed = [parse_override(text) for text in overrides]
    for key, value in fixed:
        if key in OPTIONS:
            raise UserError(f"--set {key}={value}: a sweep takes this from {OPTIONS[key]}; use {OPTIONS[key]} {value}")
    varied = [(key, text) for text in axes.grid for key in keys_of(text)]
    seen: list[str] = []
    for key, text in varied:
        values = text.partition("=")[2].strip()
        if key in OPTIONS:
            raise UserError(f"--grid {text}: a sweep takes this from {OPTIONS[key]}; use {OPTIONS[key]} {values}")
        if key in SHARED:
            raise UserError(f"--grid {text}: a sweep has only one value of {key}; use {SHARED[key]}")
        if any(overlap(key, other) for other in seen):
            raise UserError(f"--grid {text}: {key} is given twice; give all its values in one --grid")
        set_keys = [other for other, _ in fixed if overlap(key, other)] + ([key] if key == "preset" and preset else [])
        if set_keys:
            raise UserError(f"--grid {text}: --set gives {set_keys[0]} one value too; remove one of the two")
        seen.append(key)
    labels = [value for key, value in fixed if key == "run.label"]
    return str(labels[-1]) if labels else ""


def sweep_command(config: str, axes: Axes, overrides: Sequence[str], preset: str) -> str:
    """The command that runs the cells of these axes."""
    words = ["fedsim", "sweep", config, "--methods", ",".join(axes.methods), "--targets", ",".join(axes.targets)]
    words += ["--seeds", ",".join(map(str, axes.seeds)), *(["--preset", preset] if preset else [])]
    for word in overrides:
        key, value = parse_override(word)
        words += ["--output", str(value)] if key == "run.output" else ["--set", word]
    return shlex.join([*words, *(part for grid in axes.grid for part in ("--grid", grid))])


def label_of(values: Sequence[str], label: str = "") -> str:
    """`mine,train.lr=0.1`: the user's label and the grid's values, for a folder's name.

    fedsim/methods/variants.py adds to the name what the grid changes in a method.
    """
    words = [word for word in values if not word.startswith("method.")]
    return ",".join([*([label] if label else []), *words]).replace("/", "_")


def keys_of(axis: str) -> list[str]:
    """The settings of an axis: one, or several that change together (`train.epochs+train.rounds=1+40,5+8`)."""
    return [key.strip() for key in parse_override(axis)[0].split("+")]


def grid_points(grid: Sequence[str]) -> list[tuple[str, ...]]:
    """`["a=1,2", "b+c=x+y"]` -> `[("a=1", "b=x", "c=y"), ("a=2", "b=x", "c=y")]`; one empty point without a grid."""
    axes = []
    for axis in grid:
        keys, points = keys_of(axis), split_values(axis.partition("=")[2])
        together = [point.split("+") if len(keys) > 1 else [point] for point in points]
        for point, values in zip(points, together, strict=True):
            if len(values) != len(keys):
                raise UserError(f"--grid {axis}: {point} has {len(values)} values for {len(keys)} settings")
        axes.append([[f"{key}={value}" for key, value in zip(keys, values, strict=True)] for values in together])
        for (one, first), (other, second) in itertools.combinations(zip(points, axes[-1], strict=True), 2):
            if one != other and list(map(parse_override, first)) == list(map(parse_override, second)):
                raise UserError(f"--grid {axis}: {one} and {other} are the same value; give it once")
    return [tuple(itertools.chain(*point)) for point in itertools.product(*axes)]


def split_values(text: str) -> list[str]:
    """`1,[2,3],"a,b"` -> `1`, `[2,3]`, `"a,b"`: commas inside brackets and quotes are part of a value."""
    values, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        else:
            depth += (sign in "[{") - (sign in "]}")
        if sign == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += sign
    return [value.strip() for value in values]
