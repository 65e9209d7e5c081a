"""A random search over hyper-parameters: the space, the draws, the scores and the ranking, as pure functions.

Trial 0 has the file's own values, and the others are drawn. A draw depends only on the search's seed, the name of the
setting and the number of the trial: more trials, or one more setting, change none of the values that were drawn before
(DomainBed seeds each of its draws by the setting's name for the same reason).
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from fedsim.common.errors import UserError
from fedsim.common.seeding import numpy_rng
from fedsim.results.statistics import ranks
from fedsim.settings.experiment import assign, overlap, parse_override
from fedsim.sweep.axes import split_values

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
        """The value at a share in [0, 1) of the space, as the text of an override."""
        if self.kind == "choice":
            return self.choices[int(share * len(self.choices))]
        if self.kind == "int":
            return self._text(self.low + int(share * (self.high - self.low + 1)))
        if self.kind == "log":
            number = self.low * (self.high / self.low) ** share
        else:
            number = self.low + share * (self.high - self.low)
        return self.rounded(number)

    def rounded(self, number: float) -> str:
        """A number of the range with few digits, as the text of an override."""
        return self._text(min(max(float(f"{number:.{DIGITS}g}"), self.low), self.high))

    def draw(self, seed: int, trial: int) -> str:
        """The value of one trial."""
        return self.value(numpy_rng(seed, "search", self.key, trial).random())

    def _text(self, number: float) -> str:
        return str(int(number)) if self.kind == "int" else repr(float(number))


def read_space(words: Sequence[str]) -> list[Knob]:
    """The searched settings in the order of their names; UserError for one that is refused or given twice."""
    knobs = sorted(map(_knob, words), key=lambda knob: knob.key)
    for before, knob in itertools.combinations(knobs, 2):
        if overlap(before.key, knob.key):
            raise UserError(f"--space {knob.text}: {knob.key} is given twice; give its whole range in one --space")
    return knobs


def _knob(text: str) -> Knob:
    key, sign, space = (word.strip() for word in text.partition("="))
    if not sign or not key or not space:
        raise UserError(f"--space {text!r} is not of the form {FORMS}")
    section = key.partition(".")[0]
    why = REFUSED.get(key) or (REFUSED.get(section) if key not in SEARCHED else "")
    if why:
        raise UserError(f"--space {text}: {key} is not searched: {why}")
    if section not in SECTIONS or section == key:
        raise UserError(f"--space {text}: give a setting's whole name, such as train.lr or method.PART.FIELD")
    kind, colon, ends = space.partition(":")
    if colon and kind in RANGES:
        return _range(key, text, kind, ends)
    choices = tuple(split_values(space))
    if not all(choices):
        raise UserError(f"--space {text}: a value is empty; give values separated by single commas")
    if len(set(choices)) < len(choices):
        raise UserError(f"--space {text}: a value is given twice")
    if len(choices) == 1:
        raise UserError(f"--space {text}: this is one value, and not {FORMS}; a fixed value is given by --set")
    return Knob(key, text, "choice", choices=choices)


def _range(key: str, text: str, kind: str, ends: str) -> Knob:
    whole = kind == "int"
    words = ends.split(":")
    try:
        low, high = (float(word) for word in words)
    except ValueError:
        raise UserError(f"--space {text}: give two numbers, {key}={kind}:LOW:HIGH") from None
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UserError(f"--space {text}: both ends must be finite")
    if whole and not all(re.fullmatch(r"\s*[+-]?\d+\s*", word) for word in words):
        raise UserError(f"--space {text}: both ends of an int range must be whole numbers")
    if low >= high:
        raise UserError(f"--space {text}: the range is empty, because {words[0]} is not below {words[1]}")
    if kind == "log" and low <= 0:
        raise UserError(f"--space {text}: a log range must begin above 0; use uniform, or a small positive number")
    return Knob(key, text, kind, low, high)


def points(knobs: Sequence[Knob], trials: int, seed: int) -> list[dict[str, str]]:
    """{setting: value as text} of every trial; that of trial 0, which changes nothing, is empty."""
    return [{}] + [{knob.key: knob.draw(seed, trial) for knob in knobs} for trial in range(1, trials)]


def first_alike(drawn: Sequence[Mapping[str, str]], own: Mapping[str, Any]) -> list[int]:
    """For every point the number of the first that has the same values; `own`: the values of the file, of trial 0."""
    typed = [{key: parse_override(f"{key}={text}")[1] for key, text in point.items()} or dict(own) for point in drawn]
    return [typed.index(values) for values in typed]


def score(validations: Sequence[float | None]) -> float | None:
    """The mean over targets and seeds of the validation at each run's selected round; None when a run has none."""
    known = [value for value in validations if value is not None]
    return float(np.mean(known)) if known and len(known) == len(validations) else None


def ranking(scores: Mapping[int, float | None]) -> dict[int, int]:
    """{trial: rank} of the trials that have a score, the best first.

    Scores that are equal to nine digits share a rank; the first of their trials comes first.
    """
    known = {trial: value for trial, value in scores.items() if value is not None}
    found = ranks(pd.Series(known, dtype=float)).astype(int)
    return {trial: int(found[trial]) for trial in sorted(known, key=lambda trial: (found[trial], trial))}


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"train.lr": 0.1}` -> `{"train": {"lr": 0.1}}`, as in an experiment file."""
    table: dict[str, Any] = {}
    for key, value in values.items():
        assign(table, key, value)
    return table
