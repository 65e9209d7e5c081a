"""A row from outside is checked slot by slot: what a recipe cannot hold is one line, and a list counts as a tuple."""

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from support import small_experiment

from clients.objective.consistent_views import ConsistentViews
from clients.parts import Term, Unlabelled
from clients.reports.generalization_gap import GeneralizationGap
from clients.terms.proximal import Proximal
from fedsim.commands.contract import findings
from fedsim.common.errors import UserError
from fedsim.methods import table as methods
from fedsim.methods.assembly import build_recipe, find_recipe
from fedsim.methods.compatibility import check_recipe
from fedsim.methods.recipe import Recipe
from fedsim.methods.registry import find_row
from fedsim.methods.table import METHODS
from fedsim.methods.variants import method_label
from fedsim.run.plan import resolve
from fedsim.settings.experiment import Experiment
from strategies.parts import Bank, Visit
from strategies.weights.generalization_adjustment import GeneralizationAdjustment


@dataclass
class Loose(Term):
    weight: float = 0.1


@dataclass(frozen=True)
class WithList(Term):
    layers: list = field(default_factory=list)


@pytest.fixture
def row(monkeypatch):
    """A function that makes a recipe known as `mine`."""
    return lambda **slots: monkeypatch.setitem(methods.METHODS, "mine", Recipe(**slots, paper="a test"))


@pytest.mark.parametrize(("slots", "said"), [
    ({"terms": (Loose(),)}, "terms: Loose is not a frozen dataclass; write @dataclass(frozen=True)"),
    ({"terms": (WithList(),)}, "WithList.layers is a list"),
    ({"terms": Proximal()}, "terms takes a tuple of parts, and the row has Proximal(); write (Proximal(),)"),
    ({"client": ConsistentViews}, "client has the class ConsistentViews where a part is needed"),
    ({"terms": (GeneralizationGap(),)}, "terms has GeneralizationGap(), which does not fit; it is for reports"),
    ({"client": None}, "client has NoneType"),
    ({"norm": "ibn"}, "norm has str, which does not fit; it is no part"),
])  # fmt: skip
def test_what_no_recipe_can_hold_is_one_line(row, slots, said, tmp_path):
    """In a run and in `fedsim check-method`."""
    row(**slots)
    for use in (lambda: resolve(small_experiment(tmp_path, "mine")), lambda: list(findings("mine"))):
        with pytest.raises(UserError) as error:
            use()
        assert said in str(error.value)
        assert str(error.value).startswith("method 'mine': ")
        assert "\n" not in str(error.value)


# ------------------------------------- two parts never write one record, of which the later would replace the first
@dataclass(frozen=True)
class Sum(Term):
    bank: ClassVar[str] = "sum"


@dataclass(frozen=True)
class OtherSum(Sum):
    """Contributes another sum."""


def bank(record: str, title: str = "A") -> Bank:
    """A bank with that record, of a class with that name."""
    return type(title, (Bank,), {"name": record, "when": "round"})()


@dataclass(frozen=True)
class Look(Visit):
    phase: ClassVar[str] = "look"


@dataclass(frozen=True)
class LookAgain(Look):
    """Another visit of the same phase."""


@dataclass(frozen=True)
class Back(Unlabelled):
    """An answer."""


@pytest.mark.parametrize(("slots", "said"), [
    ({"banks": (bank("sum", "A"), bank("sum", "B")), "terms": (Sum(),)}, "a and b are banks of one name, 'sum'"),
    ({"banks": (bank("sum"),), "terms": (Sum(), OtherSum())}, "sum and other_sum contribute to one name"),
    *(({"banks": (bank(name),)}, f"{name!r}, which is another") for name in ("arrays", "metrics", "state")),
    ({"banks": (type("A", (Bank,), {})(),)}, "has no `name`"),
    ({"visits": (Look(), LookAgain()), "unlabelled": Back()}, "two visits are called 'look'"),
])  # fmt: skip
def test_one_record_has_one_writer(slots, said):
    with pytest.raises(UserError) as error:
        check_recipe(Recipe(**slots), "mine")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_list_is_a_tuple_and_added_parts_are_checked_too(row):
    """Combinations in either order work as with a tuple; a row that fits is not changed."""
    row(weights=GeneralizationAdjustment(), reports=[GeneralizationGap()], terms=[Proximal()])
    assert find_row("mine").terms == (Proximal(),)
    for name in ("mine", "mine+fedbn", "fedbn+mine", "fedcm+mine"):
        assert Proximal() in find_recipe(name).terms
    assert method_label(small_experiment("out", "mine+fedbn")) == "mine+fedbn"
    assert all(find_row(name) == recipe for name, recipe in METHODS.items() if name != "mine")
    for name, said in (("Loose", "not a frozen dataclass"), ("WithList", r"WithList\.layers is a list")):
        with pytest.raises(UserError, match=said):
            build_recipe(Experiment(method={"name": "fedavg", "add": [f"{__name__}:{name}"]}))
