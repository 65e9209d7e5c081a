"""What a sweep varies: methods, targets, seeds and a grid. A setting that is given in two ways is an error."""

import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedsim.common.errors import UserError
from fedsim.settings.experiment import overlap, parse_override

# Settings that a sweep gives to its cells, and the options in which the user names their values.
OPTIONS = {"method.name": "--methods", "run.target": "--targets", "run.seed": "--seeds"}
# Settings of a whole sweep, which all its cells share.
SHARED = {"run.output": "--output", "run.label": "--set run.label=NAME", "name": "--set name=NAME"}


@dataclass(frozen=True)
class Axes:
    """What a sweep varies; `targets` may be `["all"]`, `grid` holds `key=v1,v2` or `key+other=v1+w1,v2+w2` texts."""

    methods: Sequence[str]
    targets: Sequence[str]
    seeds: Sequence[int]
    grid: Sequence[str] = ()


def check_axes(axes: Axes, overrides: Sequence[str], preset: str = "") -> str:
    """Return the label that `--set run.label=...` gives to all cells; UserError for a setting that is given twice.

    Methods, targets and seeds are axes of the sweep itself; as an override or a grid key they would conflict with it.
    """
    _refuse_empty("--methods", axes.methods)
    _refuse_empty("--targets", axes.targets)  # an empty target would mean the default one
    fixed = [parse_override(override) for override in overrides]
    for key, value in fixed:
        if key in OPTIONS:
            option = OPTIONS[key]
            raise UserError(f"--set {key}={value}: a sweep takes this from {option}; use {option} {value}")
    fixed_keys = [key for key, _ in fixed]
    varied_keys: list[str] = []
    for axis in axes.grid:
        for key in keys_of(axis):
            _check_grid_key(key, axis, varied_keys)
            for other in fixed_keys:
                if overlap(key, other):
                    raise _given_by_set(axis, other)
            if key == "preset" and preset:
                raise _given_by_set(axis, key)
            varied_keys.append(key)
    labels = [str(value) for key, value in fixed if key == "run.label"]
    return labels[-1] if labels else ""


def _refuse_empty(option: str, names: Sequence[str]) -> None:
    if not all(names):
        raise UserError(f"{option}: a name is empty")


def _check_grid_key(key: str, axis: str, others: Sequence[str]) -> None:
    """UserError for a setting that is an axis by itself, is one of the whole sweep, or is in the grid already."""
    if key in OPTIONS:
        option = OPTIONS[key]
        values = axis.partition("=")[2].strip()
        raise UserError(f"--grid {axis}: a sweep takes this from {option}; use {option} {values}")
    if key in SHARED:
        raise UserError(f"--grid {axis}: a sweep has only one value of {key}; use {SHARED[key]}")
    if any(overlap(key, other) for other in others):
        raise UserError(f"--grid {axis}: {key} is given twice; give all its values in one --grid")


def _given_by_set(axis: str, key: str) -> UserError:
    return UserError(f"--grid {axis}: --set gives {key} one value too; remove one of the two")


def sweep_command(
    config: str,
    axes: Axes,
    overrides: Sequence[str],
    preset: str,
) -> str:
    """Return the command that runs the cells of these axes."""
    parts = ["fedsim", "sweep", config]
    parts += ["--methods", ",".join(axes.methods)]
    parts += ["--targets", ",".join(axes.targets)]
    parts += ["--seeds", ",".join(map(str, axes.seeds))]
    if preset:
        parts += ["--preset", preset]
    for override in overrides:
        key, value = parse_override(override)
        if key == "run.output":
            parts += ["--output", str(value)]
        else:
            parts += ["--set", override]
    for axis in axes.grid:
        parts += ["--grid", axis]
    return shlex.join(parts)


def label_of(values: Sequence[str], label: str = "") -> str:
    """Return `mine,train.lr=0.1`: the user's label and the grid's values, for a folder's name.

    fedsim/methods/variants.py adds to the name what the grid changes in a method.
    """
    parts = [label] if label else []
    parts += [value for value in values if not value.startswith("method.")]
    return ",".join(parts).replace("/", "_")


def keys_of(axis: str) -> list[str]:
    """Return the settings of an axis: one, or several that change together (`train.epochs+train.rounds=1+40,5+8`)."""
    return [key.strip() for key in parse_override(axis)[0].split("+")]


def grid_points(grid: Sequence[str]) -> list[tuple[str, ...]]:
    """`["a=1,2", "b+c=x+y"]` -> `[("a=1", "b=x", "c=y"), ("a=2", "b=x", "c=y")]`; one empty point without a grid.

    Raises UserError for a value that is given twice, and for one that has not one part for each setting of its axis.
    """
    axes = [_points_of_axis(axis) for axis in grid]
    return [tuple(itertools.chain(*point)) for point in itertools.product(*axes)]


def _points_of_axis(axis: str) -> list[list[str]]:
    """The settings of an axis at each of its values: `b+c=x+y,z+w` -> `[["b=x", "c=y"], ["b=z", "c=w"]]`."""
    keys = keys_of(axis)
    points: dict[str, list[str]] = {}
    texts = split_values(axis.partition("=")[2])
    for text in texts:
        values = text.split("+") if len(keys) > 1 else [text]
        if len(values) != len(keys):
            raise UserError(f"--grid {axis}: {text} has {len(values)} values for {len(keys)} settings")
        points[text] = [f"{key}={value}" for key, value in zip(keys, values, strict=True)]
    for one, other in itertools.combinations(points, 2):
        if _typed(points[one]) == _typed(points[other]):
            raise UserError(f"--grid {axis}: {one} and {other} are the same value; give it once")
    return [points[text] for text in texts]


def _typed(point: Sequence[str]) -> list[tuple[str, Any]]:
    """The settings of a point with their values, of which `0.1` and `0.10` are the same."""
    return [parse_override(setting) for setting in point]


def split_values(text: str) -> list[str]:
    """`1,[2,3],"a,b"` -> `1`, `[2,3]`, `"a,b"`: commas inside brackets and quotes are part of a value."""
    values = [""]
    depth = 0
    quote = ""  # that is open, if any
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
