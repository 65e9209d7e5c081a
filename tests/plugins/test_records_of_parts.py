"""Two parts never write one record unnoticed: the later one would replace what the earlier one sent."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from clients.parts import Term, Unlabelled
from fedsim.common.errors import UserError
from fedsim.methods.assembly import find_recipe
from fedsim.methods.compatibility import check_recipe
from fedsim.methods.recipe import Recipe
from strategies.parts import Bank, Visit


@dataclass(frozen=True)
class Sum(Term):
    """Contributes a sum."""

    bank: ClassVar[str] = "sum"


@dataclass(frozen=True)
class OtherSum(Sum):
    """Contributes another sum."""


def bank(record: str, title: str) -> Bank:
    """A bank with that record, of a class with that name."""
    return type(title, (Bank,), {"name": record, "when": "round"})()


@dataclass(frozen=True)
class Look(Visit):
    """A visit."""

    phase: ClassVar[str] = "look"


@dataclass(frozen=True)
class LookAgain(Look):
    """Another visit of the same phase."""


@dataclass(frozen=True)
class Back(Unlabelled):
    """An answer."""


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (Recipe(banks=(bank("sum", "A"), bank("sum", "B")), terms=(Sum(),)), "a and b are banks of one name, 'sum'"),
        (Recipe(banks=(bank("sum", "A"),), terms=(Sum(), OtherSum())), "sum and other_sum contribute to one name"),
        *((Recipe(banks=(bank(name, "A"),)), f"{name!r}, which is another") for name in ("arrays", "metrics", "state")),
        (Recipe(banks=(type("A", (Bank,), {})(),)), "has no `name`"),
        (Recipe(visits=(Look(), LookAgain()), unlabelled=Back()), "two visits are called 'look'"),
    ],
)
def test_one_record_has_one_writer(recipe, said):
    """Earlier both banks got the contribution that was sent last."""
    with pytest.raises(UserError) as error:
        check_recipe(recipe, "mine")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_row_and_its_copy_are_not_combined(monkeypatch):
    """The page's own SCAFFOLD and fedsim's have different parts, but the record of one name."""
    monkeypatch.setenv("FEDSIM_PLUGINS", str(Path(__file__).parent))
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(UserError, match="'control'; rename"):
        find_recipe("scaffold:scaffold+fedlesam-s")
