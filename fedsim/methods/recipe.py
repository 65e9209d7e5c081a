"""A method as a row of exchangeable parts, in one slot for each question; two rows can be combined into one."""

import dataclasses
import json
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeAlias, TypeVar

from clients.parts import Augment, Batches, Companion, LocalUpdate, Objective, Report, Step, Term, Unlabelled
from clients.recipe import ClientRecipe
from fedsim.common.errors import UserError
from fedsim.common.values import JsonTable
from fedsim.models.infer.base import Infer
from fedsim.models.inserts.base import Insert
from fedsim.models.norms.base import Norm
from fedsim.parts.part import Part, part_name
from strategies.parts import Bank, Compress, Fuse, Refine, Share, Visit, Weights

# Every slot and the base class (contract) of its parts: a class belongs to each slot from whose contract it derives.
SLOTS: dict[str, type[Part]] = {
    "share": Share,
    "compress": Compress,
    "weights": Weights,
    "fuse": Fuse,
    "banks": Bank,
    "refine": Refine,
    "visits": Visit,
    "objective": Objective,
    "update": LocalUpdate,
    "companions": Companion,
    "step": Step,
    "terms": Term,
    "batches": Batches,
    "augment": Augment,
    "reports": Report,
    "unlabelled": Unlabelled,
    "norm": Norm,
    "inserts": Insert,
    "infer": Infer,
}
P = TypeVar("P")
Filled: TypeAlias = JsonTable  # by slot: a part, or the parts of a list
LIST_SLOTS = ("banks", "refine", "visits", "companions", "terms", "reports", "inserts")

TEXTS = ("paper", "discloses")


@dataclass(frozen=True)
class Recipe(ClientRecipe):
    """A method: one part for each question; every default is FedAvg's.

    tried_with: settings for a first try, where the method does not run with those of `configs/digits.toml`

        >>> from clients.terms.proximal import Proximal
        >>> recipe = Recipe(terms=(Proximal(mu=0.01),))
        >>> recipe.named["proximal"].mu, type(recipe.weights).__name__
        (0.01, 'ByExamples')
    """

    paper: str = ""
    discloses: str = "model updates"
    tried_with: tuple[str, ...] = ()

    @cached_property
    def pairs(self) -> tuple[tuple[str, Part], ...]:
        """(slot, part) for every part; kept, because the parts of all rows are looked through for every setting."""
        return tuple((slot, part) for slot in SLOTS for part in self.parts_in(slot))

    def parts_in(self, slot: str) -> tuple[Part, ...]:
        """The parts in one slot: none, one or several."""
        value = getattr(self, slot)
        return value if slot in LIST_SLOTS else () if value is None else (value,)

    @property
    def named(self) -> dict[str, Part]:
        """The parts by settings name."""
        return {part_name(part): part for _, part in self.pairs}

    @property
    def uses_target_unlabelled(self) -> bool:
        """Whether the method trains on unlabelled images of the unseen domain. It is then ranked separately."""
        return self.unlabelled is not None

    def label(self, method: str) -> str:
        """Name of the method in results; a part with `tag` shows it, as in `ccst(pixel)`."""
        tags = [part.tag for _, part in self.pairs if part.tag]
        return f"{method}({', '.join(tags)})" if tags else method

    def of(self, kind: type[P]) -> list[P]:
        """The parts of that class or contract, in the order of the slots; a part in two slots is listed once."""
        if kind not in self._by_kind:
            parts: list[P] = []
            for _, part in self.pairs:
                if isinstance(part, kind) and part not in parts:
                    parts.append(part)
            self._by_kind[kind] = parts
        return list(self._by_kind[kind])

    @cached_property
    def _by_kind(self) -> dict[type, list[Any]]:
        """The results of `of`, which is asked in every round."""
        return {}

    def disclosure(self) -> str:
        """What leaves the clients: the row's own text, and what each part with `discloses` adds."""
        parts = [part.discloses for _, part in self.pairs if part.discloses]
        return "; ".join([self.discloses, *dict.fromkeys(parts)])


def values_of(recipe: Recipe) -> dict[str, JsonTable]:
    """The values of all fields by slot and part, as JSON gives them back: {"terms.proximal": {"mu": 0.1}}."""
    table = {f"{slot}.{part_name(part)}": dataclasses.asdict(part) for slot, part in recipe.pairs}
    return json.loads(json.dumps(table, default=str))


def changed_fields(part: Part, other: Part) -> dict[str, Any]:
    """{field: its value} of those in which a part differs from another one of its class."""
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return {name: value for name, value in values.items() if value != getattr(other, name)}


def in_order(recipe: Recipe) -> Recipe:
    """The recipe with its terms and refining parts by their `order`, so that `a+b` has the numbers of `b+a`."""
    slots = {slot: getattr(recipe, slot) for slot in ("terms", "refine", "companions")}
    ordered: Filled = {
        slot: tuple(sorted(parts, key=lambda part: (getattr(part, "order", 0), part_name(part))))
        for slot, parts in slots.items()
    }
    return dataclasses.replace(recipe, **ordered)


def combine(a: tuple[str, Recipe], b: tuple[str, Recipe]) -> tuple[str, Recipe]:
    """(name, recipe) of both rows in one: lists are joined, and a part that differs from FedAvg's replaces FedAvg's.

    Raises UserError when both rows have a part of their own in one slot, and when a row adds nothing to the other.
    """
    name = f"{a[0]}+{b[0]}"
    parts: Filled = {slot: _joined(slot, a, b) for slot in SLOTS}
    texts: Filled = {text: _both(getattr(a[1], text), getattr(b[1], text)) for text in TEXTS}
    tried_with = tuple(dict.fromkeys((*a[1].tried_with, *b[1].tried_with)))
    both = Recipe(**parts, **texts, pooled=a[1].pooled or b[1].pooled, tried_with=tried_with)
    for (half, recipe), other in ((a, b[0]), (b, a[0])):
        if same_parts(both, recipe):
            raise UserError(f"{name}: {other} adds nothing to {half}; use {half} alone")
    return name, both


def _both(one: str, other: str) -> str:
    """Two texts joined in one line; an empty text is left out, and equal texts appear once."""
    return "; ".join(dict.fromkeys(text for text in (one, other) if text))


def _joined(slot: str, a: tuple[str, Recipe], b: tuple[str, Recipe]) -> object:
    """The parts of the combination in one slot."""
    first, second, standard = getattr(a[1], slot), getattr(b[1], slot), getattr(Recipe(), slot)
    if slot in LIST_SLOTS:
        rest = tuple(part for part in second if part not in first)
        clash = [(one, other) for one in first for other in rest if type(one) is type(other)]
        if not clash:
            return first + rest
        first, second = clash[0]
    elif first in (standard, second) or second == standard:
        return second if second != standard else first
    one, other = part_name(first), part_name(second)
    if type(first) is type(second):
        one, other = (
            f"{part_name(part)} with " + ", ".join(f"{field} = {value!r}" for field, value in fields.items())
            for part, fields in ((first, changed_fields(first, second)), (second, changed_fields(second, first)))
        )
    raise UserError(f"{a[0]} and {b[0]} cannot be combined: {slot} is {one} in one and {other} in the other")


def same_parts(a: Recipe, b: Recipe) -> bool:
    """Whether two recipes have the same parts; their texts may differ."""
    blank: Filled = {**dict.fromkeys(TEXTS, ""), "tried_with": ()}
    return dataclasses.replace(a, **blank) == dataclasses.replace(b, **blank)


@cache
def slots_of(kind: type) -> tuple[str, ...]:
    """The slots that a class of parts belongs to, which follow from the contracts from which it derives."""
    return tuple(slot for slot, contract in SLOTS.items() if issubclass(kind, contract))
