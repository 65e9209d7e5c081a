"""Where a setting has an effect: its field declares it in its annotation, in one closed vocabulary.

    p: Annotated[float, Field(ge=0, le=1), Only(variant="img_p")] = 0.5

A run says of every changed setting without an effect that it has none (`fedsim.runs.no_effect`), and `fedsim methods
NAME` shows what each needs.
"""

import math
import typing
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any


class Trait(Enum):
    """Facts of a run's data, network and method."""

    MASKS = "data that have masks"
    IMAGES = "a data set of images"
    TENSORS = "a data set of tensors that are no images"
    COLOURS = "images of three channels"
    FOLDERS = "images in folders of domains"
    ROOT = "a data set whose files are not part of a package"
    OUTSIDE = "a data set of another package"
    UNSEEN = "an unseen domain (run.target)"
    STEM = "a backbone with batch norm before its first stage"
    BOTTLENECK = "model.bottleneck above 0"
    NO_BOTTLENECK = "model.bottleneck = 0"
    XAN = "method.norm = 'xan'"
    PASSES = "batches whose number [train] says (method.batches)"
    FEDERATED = "a method that does not pool all data on one client"
    PLAIN_PASS = "a step that trains by the network's plain pass, which is what it compiles"


class Size(Enum):
    """Numbers of a run at which a setting has reached everything, so that a larger value changes nothing."""

    CLIENT_IMAGES = "the number of a client's training images"
    TARGET_IMAGES = "the number of images of the unseen domain that train"
    CLIENTS = "the number of clients"


Facts = dict[Trait | Size, float]  # what is known of a run; a trait that is not in it may hold


@dataclass(frozen=True)
class Above:
    """Any larger number."""

    number: float


GIVEN = Above(-math.inf)  # any value but an empty one


class Only:
    """What a setting needs to have an effect: all `needs`, and these values of other settings of its part or section.

    A tuple is a choice of values. Where an annotation has several of these, one of them is enough.

    refused: a run is refused in place of a remark, unless it belongs to a grid over one of the other settings
    """

    def __init__(self, *needs: Trait | Size, refused: bool = False, **others: object) -> None:
        self.needs, self.refused, self.others = needs, refused, others

    def holds(self, settings: object, facts: Facts, values: tuple[Any, ...]) -> bool:
        """Whether a setting with one of these values (the changed and the usual one) has an effect."""
        least = min((value or math.inf for value in values), default=0) if any(map(_is_size, self.needs)) else 0
        met = [least < facts.get(need, math.inf) if _is_size(need) else facts.get(need, True) for need in self.needs]
        return all(met) and all(_fits(getattr(settings, name), expected) for name, expected in self.others.items())

    def text(self, prefix: str = "") -> str:
        """What it needs, in words; `prefix` stands before the names of the other settings."""
        conditions = [f"a value below {need.value}" if _is_size(need) else need.value for need in self.needs]
        return " and ".join(
            [*conditions, *(f"{prefix}{name}{_shown(expected)}" for name, expected in self.others.items())]
        )


def _is_size(need: Trait | Size) -> bool:
    return isinstance(need, Size)


def _fits(value: Any, wanted: object) -> bool:
    if wanted is GIVEN:
        return bool(value)
    if isinstance(wanted, Above):
        return value > wanted.number
    return value in (wanted if isinstance(wanted, tuple) else (wanted,))


def _shown(wanted: object) -> str:
    if wanted is GIVEN:
        return " given"
    if isinstance(wanted, Above):
        return f" above {wanted.number:g}"
    return " = " + " or ".join(
        repr(value) if isinstance(value, str) else str(value).lower()
        for value in (wanted if isinstance(wanted, tuple) else (wanted,))
    )


@cache
def marks(kind: type, mark: type) -> dict[str, tuple[Any, ...]]:
    """{setting: its marks of that class} of the fields whose annotation has one."""
    hints = typing.get_type_hints(kind, include_extras=True)
    every = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    marked = {name: tuple(one for one in values if type(one) is mark) for name, values in every.items()}
    return {name: values for name, values in marked.items() if values}


def conditions(kind: type) -> dict[str, tuple[Only, ...]]:
    """{setting: what it needs}, one of which is enough, of the fields that declare it."""
    return marks(kind, Only)


def unmet(settings: object, usual: object, facts: Facts) -> dict[str, tuple[Only, ...]]:
    """{changed setting: what it needs} of those that have no effect; `usual` has the values that are no change."""
    kind: type = type(settings)
    return {
        name: needs
        for name, needs in conditions(kind).items()
        if (values := (getattr(settings, name), getattr(usual, name)))[0] != values[1]
        and not any(one.holds(settings, facts, values) for one in needs)
    }


def in_words(needs: tuple[Only, ...], prefix: str = "") -> str:
    """What a setting needs, one of which is enough."""
    return " or ".join(one.text(prefix) for one in needs)
