"""What a search varies: the settings of `--space`, or those that a method declares, and the values that are drawn.

A draw depends only on the search's seed, the name of the setting and the number of the trial: more trials, or one more
setting, change none of the values that were drawn before. DomainBed seeds each of its draws by the setting's name for
the same reason.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsim.common.errors import UserError
from fedsim.common.seeding import numpy_rng
from fedsim.methods.assembly import build_recipe
from fedsim.methods.part_settings import method_facts
from fedsim.methods.recipe import LIST_SLOTS, SLOTS, Recipe
from fedsim.parts.part import part_name
from fedsim.records.differences import ABSENT
from fedsim.settings.effect import marks
from fedsim.settings.experiment import Experiment, overlap, parse_override
from fedsim.settings.plugins import is_outside
from fedsim.settings.tuned import Tuned, spaces
from fedsim.studies.axes import OPTIONS, split_values

FORMS = "KEY=log:LOW:HIGH, KEY=uniform:LOW:HIGH, KEY=int:LOW:HIGH or KEY=VALUE,VALUE,..."
RANGES = ("log", "uniform", "int")
DIGITS = 4  # significant digits of a drawn number: enough for a search, and short in a folder's name
SEARCHED = ("data.augment", "data.normalize")  # the settings of [data] that say how to learn, not what
# Settings that are not searched, and why not.
REFUSED = {
    "name": "it is the name of the experiment",
    "preset": "it changes more than one setting; use --preset",
    "method.name": "a search is for one method; use --method",
    "run.target": "the unseen domain is no hyper-parameter; use --targets",
    "run.seed": "a seed is no hyper-parameter; use --seeds",
    "run": "[run] says what is unseen, what selects the round and where a run is computed, not how a model learns",
    "data": f"[data] says what the task is; only {' and '.join(SEARCHED)} say how a model learns",
    "train.evaluate_clients": "it changes the validation by which the trials are scored",
    "train.evaluate_every": "it changes the validation by which the trials are scored",
    "train.dp_epsilon": "it is the privacy that is promised, and validation would choose the least",
    "train.dp_max_epsilon": "it is the privacy that is promised, and validation would choose the least",
    "train.dp_delta": "it is the privacy that is promised, and validation would choose the least",
}
SECTIONS = ("train", "model", "method", "parts", "data")


@dataclass(frozen=True)
class Knob:
    """One searched setting: `text` as the user wrote it, and either a range or a list of values.

    kind: log (uniform in the logarithm), uniform, int (whole numbers, both ends included) or choice
    """

    key: str
    text: str
    kind: str
    low: float = 0.0
    high: float = 0.0
    choices: tuple[str, ...] = ()

    @property
    def ends(self) -> tuple[str, ...]:
        """The values that show whether the setting allows the whole space: both ends, or all values of a list."""
        return self.choices or (self._text(self.low), self._text(self.high))

    def value(self, share: float) -> str:
        """Return the value at a share in [0, 1) of the space, as the text of an override."""
        if self.kind == "choice":
            place = int(share * len(self.choices))
            return self.choices[place]
        if self.kind == "int":
            count = self.high - self.low + 1
            return self._text(self.low + int(share * count))
        if self.kind == "log":
            factor = self.high / self.low
            return self.rounded(self.low * factor**share)
        width = self.high - self.low
        return self.rounded(self.low + share * width)

    def rounded(self, number: float) -> str:
        """Return a number of the range with few digits, as the text of an override."""
        short = float(f"{number:.{DIGITS}g}")
        return self._text(min(max(short, self.low), self.high))

    def draw(self, seed: int, trial: int) -> str:
        """Return the value of one trial."""
        return self.value(numpy_rng(seed, "search", self.key, trial).random())

    def _text(self, number: float) -> str:
        return str(int(number)) if self.kind == "int" else repr(float(number))


def points(knobs: Sequence[Knob], trials: int, seed: int) -> list[dict[str, str]]:
    """Return {setting: value as text} of every trial; that of trial 0, which changes nothing, is empty."""
    drawn: list[dict[str, str]] = [{}]
    for trial in range(1, trials):
        drawn.append({knob.key: knob.draw(seed, trial) for knob in knobs})
    return drawn


def typed_values(point: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a point as an override gives them: `{"train.lr": "0.10"}` -> `{"train.lr": 0.1}`."""
    return dict(parse_override(f"{key}={text}") for key, text in point.items())


def first_alike(drawn: Sequence[Mapping[str, str]], file_values: Mapping[str, Any]) -> list[int]:
    """Return for every point the number of the first that has the same values; trial 0 has those of the file."""
    values = [typed_values(point) or dict(file_values) for point in drawn]
    return [values.index(point) for point in values]


def read_space(texts: Sequence[str]) -> list[Knob]:
    """Return the searched settings in the order of their names; UserError for one that is refused or given twice."""
    knobs = sorted(map(_read_knob, texts), key=lambda knob: knob.key)
    for before, knob in itertools.combinations(knobs, 2):
        if overlap(before.key, knob.key):
            raise UserError(f"--space {knob.text}: {knob.key} is given twice; give its whole range in one --space")
    return knobs


def _read_knob(text: str) -> Knob:
    key, _, space = (part.strip() for part in text.partition("="))
    if not key or not space:
        raise UserError(f"--space {text!r} is not of the form {FORMS}")
    _refuse_setting(key, text)
    kind, colon, ends = space.partition(":")
    if colon and kind in RANGES:
        return Knob(key, text, kind, *_read_range(key, text, kind, ends))
    choices = tuple(split_values(space))
    if not all(choices):
        raise UserError(f"--space {text}: a value is empty; give values separated by single commas")
    if len(set(choices)) < len(choices):
        raise UserError(f"--space {text}: a value is given twice")
    if len(choices) == 1:
        raise UserError(f"--space {text}: this is one value, and not {FORMS}; a fixed value is given by --set")
    return Knob(key, text, "choice", choices=choices)


def _refuse_setting(key: str, text: str) -> None:
    """UserError for a setting that says something else than how a model learns, or whose name is not whole."""
    section = key.partition(".")[0]
    reason = REFUSED.get(key)
    if not reason and key not in SEARCHED:
        reason = REFUSED.get(section)
    if reason:
        raise UserError(f"--space {text}: {key} is not searched: {reason}")
    if section not in SECTIONS or section == key:
        raise UserError(f"--space {text}: give a setting's whole name, such as train.lr or method.PART.FIELD")


def _read_range(
    key: str,
    text: str,
    kind: str,
    ends: str,
) -> tuple[float, float]:
    """(the lower end, the upper end) of a range; UserError where they are none."""
    numbers = ends.split(":")
    try:
        low, high = map(float, numbers)
    except ValueError:
        raise UserError(f"--space {text}: give two numbers, {key}={kind}:LOW:HIGH") from None
    if not all(map(math.isfinite, (low, high))):
        raise UserError(f"--space {text}: both ends must be finite")
    if kind == "int" and not all(re.fullmatch(r"\s*[+-]?\d+\s*", number) for number in numbers):
        raise UserError(f"--space {text}: both ends of an int range must be whole numbers")
    if low >= high:
        raise UserError(f"--space {text}: the range is empty, because {numbers[0]} is not below {numbers[1]}")
    if kind == "log" and low <= 0:
        raise UserError(f"--space {text}: a log range must begin above 0; use uniform, or a small positive number")
    return low, high


def find_space(texts: Sequence[str], experiment: Experiment, overrides: Sequence[str]) -> list[Knob]:
    """Return the settings of `--space`, or the declared ones that `--set` leaves open.

    Raises UserError when there are none, and for a setting that is given in two ways.
    """
    knobs = read_space(texts or declared_space(experiment))
    if not texts:
        fixed = [parse_override(override)[0] for override in overrides]
        knobs = [knob for knob in knobs if not any(overlap(knob.key, key) for key in fixed)]
    if not knobs:
        method = experiment.method_name
        raise UserError(f"--set leaves no declared setting of {method} open; a search needs a --space {FORMS}")
    for key, value in map(parse_override, overrides):
        _refuse_override(key, value, knobs)
    return knobs


def _refuse_override(key: str, value: Any, knobs: Sequence[Knob]) -> None:
    """UserError for an override of a searched setting, or of one that has an option of its own."""
    if key in OPTIONS:
        option = OPTIONS[key].replace("--methods", "--method")
        raise UserError(f"--set {key}={value}: a search takes this from {option}; use {option} {value}")
    for knob in knobs:
        if overlap(knob.key, key):
            raise UserError(f"--space {knob.text}: --set gives {key} one value too; remove one of the two")


def declared_space(experiment: Experiment) -> list[str]:
    """Return the spaces that [train] and a method's parts declare (`settings/tuned.py`), as `--space` takes them."""
    recipe = build_recipe(experiment)
    facts = method_facts(recipe)
    sections: list[tuple[str, object]] = [("train", experiment.train)]
    sections += [(f"method.{part_name(part)}", part) for _, part in recipe.pairs]
    declared = {}
    for section, settings in sections:
        for name, tuned in spaces(settings, facts).items():
            declared[f"{section}.{name}"] = tuned.space
    return [f"{key}={space}" for key, space in declared.items()]


def without_space(experiment: Experiment) -> list[str]:
    """Return a line for each part from outside that has fields without a range: a search leaves them as they are."""
    lines = []
    for _, part in build_recipe(experiment).pairs:
        kind: type = type(part)
        names = [field.name for field in dataclasses.fields(part) if field.name not in marks(kind, Tuned)]
        if names and is_outside(f"{kind.__module__}:"):
            lines.append(f"{part_name(part)}: {', '.join(names)} without a range (Tuned): not searched")
    return lines


def values_in_file(knobs: Sequence[Knob], read: Callable[..., Experiment]) -> dict[str, Any]:
    """Return the file's own value of each setting.

    read: gives the experiment with some overrides

    Raises UserError when the method lacks a setting, or when a space leaves the bounds of a setting.
    """
    from fedsim.runs.plan import resolve

    for knob in knobs:
        try:
            for text in knob.ends:
                resolve(read(f"{knob.key}={text}"))
        except UserError as error:
            raise UserError(f"--space {knob.text}: {error}") from None
    plan = resolve(read())
    return {knob.key: _value_in_file(knob, plan.experiment, plan.recipe) for knob in knobs}


def _value_in_file(knob: Knob, experiment: Experiment, recipe: Recipe) -> Any:
    """The value that a setting has without the search, as an override would give it."""
    section, *path = knob.key.split(".")
    if section == "method" and path[0] in SLOTS:
        return _parts_in_file(path[0], recipe)
    if section == "parts" or (section == "method" and len(path) > 1):
        name, field = path[:2]
        parts = recipe.named
        if name not in parts:
            listed = ", ".join(parts)
            raise UserError(f"--space {knob.text}: {experiment.method_name} has no part {name!r}; it has: {listed}")
        value = getattr(parts[name], field)
        return list(value) if isinstance(value, tuple) else value
    value = experiment.model_dump()[section]
    for name in path:
        value = value.get(name, ABSENT)
    return value


def _parts_in_file(slot: str, recipe: Recipe) -> list[str] | str:
    """The names of the parts in a slot of the recipe; in a slot for one part that name, or `none`."""
    names = [part_name(part) for part in recipe.parts_in(slot)]
    if slot in LIST_SLOTS:
        return names
    return names[0] if names else "none"
