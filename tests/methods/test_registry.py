"""Parts are known without a second list, a part in two slots is one part, and fields are checked like settings."""

from dataclasses import dataclass
from typing import Annotated

import pytest
from pydantic import Field

from clients.parts import Report, Term
from fedsim.common.errors import UserError
from fedsim.methods import table as methods
from fedsim.methods.assembly import build_recipe, find_recipe
from fedsim.methods.recipe import SLOTS, Recipe, parts_of
from fedsim.methods.registry import FOLDERS, parts_by_slot
from fedsim.parts.part import part_name
from fedsim.settings.experiment import Experiment, from_table, parse_override


@dataclass(frozen=True)
class Watcher(Term, Report):
    weight: Annotated[float, Field(ge=0)] = 0.5

    def begin(self, round):
        """Add nothing."""
        return


@pytest.fixture
def watcher(monkeypatch):
    monkeypatch.setitem(methods.METHODS, "watched", Recipe(terms=(Watcher(),), reports=(Watcher(),), paper="none"))


def recipe_of(**method):
    return build_recipe(Experiment(method={"name": "fedavg", **method}))


def test_every_slot_has_a_folder_whose_parts_are_known():
    assert list(FOLDERS) == list(SLOTS)
    known = parts_by_slot()
    assert {"coordinate_median", "private_mean", "trimmed_mean"} <= set(known["fuse"])
    for recipe in methods.METHODS.values():
        assert all(part_name(part) in known[slot] for slot, part in parts_of(recipe))


def test_a_part_that_a_row_uses_is_known_to_the_settings_in_both_of_its_slots(watcher):
    """Without a second list, its fields can be set, and it can be added to another row."""
    for recipe, weight in (
        (recipe_of(name="watched", watcher={"weight": 0.25}), 0.25),
        (recipe_of(add=["watcher"]), 0.5),
        (recipe_of(add=["watcher"], watcher={"weight": 2}), 2),
    ):
        assert (recipe.terms, recipe.reports) == ((Watcher(weight),), (Watcher(weight),))


def test_combinations_and_exchange():
    both = find_recipe("gperxan+feddg-ga")
    exchanged = recipe_of(weights="generalization_adjustment", add=["guiding_head"], guiding_head={"weight": 0.25})
    assert type(both.norm).__name__ == "XAN"
    assert type(both.weights).__name__ == "GeneralizationAdjustment"
    for recipe in (both, exchanged):
        assert [type(report).__name__ for report in recipe.reports] == ["GeneralizationGap"]
    assert [term.weight for term in exchanged.terms] == [0.25]


@pytest.mark.parametrize(("words", "said"), [
    ("fedprox proximal.mu=-1", "method.proximal.mu: Input should be greater than or equal to 0"),
    ("gperxan xan.stages=(1,2)", "valid array (got '(1,2)'); write a list such as [1, 2, 3, 4]"),
    ("fedprox proximal.nu=1", "known: mu"),
    ("fedsb balanced_budget.unit=images", "'examples' or 'batches'"),
    ("fedprox add=['proximal']", "already"),
    ("fedavg terms=['proximal','proximal']", "twice"),
    ("fedavg add=['uniform','generalization_adjustment']", "takes one part"),
    ("fedavg weights.d=0.5", "method.by_examples.d"),
    ("fedavg norm=5", "no part '5'"),
    ("fedavg weights=unifrom", "did you mean 'uniform'"),
    ("fedavg guide=1", "has no part 'guide'"),
    ("fedavg guiding_head.weight=1", "add it with method.add"),
    ("fedavg add=['style_bank']", "no part contributes"),
    ("csac weights=generalization_adjustment", "use one of the two"),
    ("gperxan norm=batch_norm", "needs norm 'xan'"),
    ("gperxan+gfedavg-ibn", "cannot be combined"),
    ("deepall fuse=coordinate_median", "pooled on one client"),
    ("fedavg+fedprox", "fedavg adds nothing to fedprox"),
    ("fedbn without_batch_norm.upload=false", "no model for the unseen domain"),
    ("fedig-a norm=batch_norm", "norm layers have adapters for unseen domains, which does not hold here"),
    ("fada inserts=none", "a part of fada needs disentangler there"),
    ("fada weights=uniform", "target_attention visits for the weights of method.weights alone"),
    ("fedavg weights=uniform add=['generalization_adjustment']", "uniform and generalization_adjustment are both for"),
])  # fmt: skip
def test_settings_of_parts_that_cannot_be_are_one_line(words, said):
    name, *settings = words.split(" ")
    method = {"name": name}
    for key, value in map(parse_override, settings):
        part, _, field = key.partition(".")
        method[part] = {field: value} if field else value
    with pytest.raises(UserError) as error:
        recipe_of(**method)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("parts", "said"), [
    ({"semantic_calibration": {"acquire": 3}}, "parts.semantic_calibration has no field 'acquire'"),
    ({"semantic_calibraton": {"acquire_epochs": 3}}, "did you mean 'semantic_calibration'"),
])  # fmt: skip
def test_the_table_of_parts_is_checked_for_every_method(parts, said):
    """A typo in [parts] is an error even when the method does not have that part."""
    with pytest.raises(UserError, match=said) as error:
        build_recipe(from_table({"method": {"name": "fedavg"}, "parts": parts}))
    assert "\n" not in str(error.value)
