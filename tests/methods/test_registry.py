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
from fedsim.methods.registry import FOLDERS, find_part, parts_by_slot
from fedsim.parts.part import part_name
from fedsim.settings.experiment import Experiment, from_table


@dataclass(frozen=True)
class Watcher(Term, Report):
    """A part in two slots: it is a term and a report."""

    weight: Annotated[float, Field(ge=0)] = 0.5

    def begin(self, round):
        """Add nothing."""
        return


@pytest.fixture
def watcher(monkeypatch):
    """A row that uses a part which is in no list."""
    monkeypatch.setitem(methods.METHODS, "watched", Recipe(terms=(Watcher(),), reports=(Watcher(),), paper="none"))


def recipe_of(**method):
    """The recipe of `[method]` settings."""
    return build_recipe(Experiment(method={"name": "fedavg", **method}))


def test_every_slot_has_a_folder_whose_parts_are_known():
    """A part is known as soon as its file is in its slot's folder."""
    assert list(FOLDERS) == list(SLOTS)
    known = parts_by_slot()
    assert {"coordinate_median", "private_mean", "trimmed_mean"} <= set(known["fuse"])
    assert {"bin", "xan"} <= set(known["norm"])
    for recipe in methods.METHODS.values():
        assert all(part_name(part) in known[slot] for slot, part in parts_of(recipe))


def test_a_part_that_a_row_uses_is_known_to_the_settings(watcher):
    """Without a second list, its fields can be set, and it can be added to another row."""
    assert recipe_of(name="watched", watcher={"weight": 0.1}).terms[0].weight == 0.1
    assert recipe_of(add=["watcher"]).terms == (Watcher(),)


def test_a_name_is_looked_up_without_a_walk_through_the_parts_of_all_rows(monkeypatch):
    """Planning a search of 126 cells looks up 6,503 names; a row that is registered later is found all the same."""
    find_part("proximal")
    walked = []
    for module in ("fedsim.methods.recipe", "fedsim.methods.registry"):
        monkeypatch.setattr(f"{module}.parts_of", lambda row: walked.append(row) or parts_of(row), raising=False)
    find_part("proximal")
    assert not walked
    with pytest.raises(UserError):
        find_part("watcher")
    monkeypatch.setitem(methods.METHODS, "watched", Recipe(terms=(Watcher(),), paper="none"))
    assert find_part("watcher") is Watcher


def test_a_part_in_two_slots_gets_its_settings_in_both(watcher):
    """Earlier only the last slot got them."""
    recipe = recipe_of(name="watched", watcher={"weight": 0.25})
    assert (recipe.terms, recipe.reports) == ((Watcher(0.25),), (Watcher(0.25),))
    added = recipe_of(add=["watcher"], watcher={"weight": 2})
    assert (added.terms, added.reports) == ((Watcher(2),), (Watcher(2),))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "fedprox", "proximal": {"mu": -1}}, "method.proximal.mu: Input should be greater than or equal to 0"),
        ({"name": "gfedavg", "guiding_head": {"weight": -5}}, "method.guiding_head.weight"),
        ({"name": "csac", "semantic_calibration": {"acquire_epochs": -1}}, "acquire_epochs"),
        ({"name": "csac", "semantic_calibration": {"acquire_epochs": True}}, "valid integer"),
        ({"name": "fedprox", "proximal": {"mu": "0.1"}}, "valid number"),
        ({"name": "fedprox", "proximal": {"mu": float("inf")}}, "finite"),
        ({"name": "fedprox", "proximal": {"nu": 1}}, "known: mu"),
        ({"name": "fedsb", "balanced_budget": {"unit": "images"}}, "'examples' or 'batches'"),
        ({"fuse": "trimmed_mean", "trimmed_mean": {"beta": 0.5}}, "less than 0.5"),
        ({"name": "fedprox", "add": ["proximal"]}, "already"),
        ({"add": ["proximal", "proximal"]}, "twice"),
        ({"terms": ["proximal", "proximal"]}, "twice"),
        ({"add": ["uniform", "generalization_adjustment"]}, "takes one part"),
        ({"weights": {"d": 0.5}}, "method.by_examples.d"),
        ({"client": {"weight": 0.3}}, "method.supervised_step.weight"),
        ({"norm": ["xan"]}, "takes one part"),
        ({"norm": 5}, "no part '5'"),
        ({"terms": 5}, "names of parts"),
        ({"add": 5}, "names of parts"),
        ({"add": [5]}, "names of parts"),
        ({"name": "deepall+feddg-ga"}, "pooled on one client"),
        ({"name": "deepall", "fuse": "coordinate_median"}, "pooled on one client"),
        ({"name": "fedavg+fedprox"}, "fedavg adds nothing to fedprox"),
        (
            {"name": "fedig-a", "norm": "batch_norm"},
            "norm layers have adapters for unseen domains, which does not hold here",
        ),
        ({"infer": "zero_shot_adapter"}, "adapter = true"),
        ({"add": ["style_bank"]}, "no part contributes"),
    ],
)
def test_settings_of_parts_that_cannot_be_are_one_line(settings, said):
    """A wrong range or type, a part that is named twice, and a part without effect give one line with the setting."""
    with pytest.raises(UserError) as error:
        recipe_of(**settings)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_row_with_a_value_outside_its_range_is_refused(monkeypatch):
    """The values of a row are checked like settings."""
    monkeypatch.setitem(methods.METHODS, "wrong", Recipe(terms=(Watcher(-1.0),)))
    with pytest.raises(UserError, match=r"method\.watcher\.weight"):
        find_recipe("wrong")


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"semantic_calibration": {"acquire": 3}}, "parts.semantic_calibration has no field 'acquire'"),
        ({"semantic_calibraton": {"acquire_epochs": 3}}, "did you mean 'semantic_calibration'"),
        ({"semantic_calibration": {"acquire_epochs": -1}}, "acquire_epochs"),
    ],
)
def test_the_table_of_parts_is_checked_for_every_method(parts, said):
    """A typo in [parts] is an error even when the method does not have that part."""
    with pytest.raises(UserError) as error:
        build_recipe(from_table({"method": {"name": "fedavg"}, "parts": parts}))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"train": {"rounds": True}}, "train.rounds"),
        ({"train": {"rounds": "3"}}, "train.rounds"),
        ({"run": {"seed": False}}, "run.seed"),
        ({"train": {"persist_optimizer": 1}}, "train.persist_optimizer"),
        ({"method": {"name": ""}}, "method.name is missing"),
        ({"method": {"name": 3}}, "method.name is missing"),
        ({"method": "csac"}, "name = 'csac'"),
        ({"presets": 3}, "presets"),
        ({"presets": {"a": 3}, "preset": "a"}, "presets.a"),
        ({"train": 3}, "train"),
        ({"parts": {"proximal": 3}}, "parts.proximal"),
    ],
)
def test_settings_of_a_wrong_type_are_one_short_line(tmp_path, table, said):
    """The message is neither a traceback nor the whole configuration."""
    import tomli_w

    from fedsim.settings.experiment import read_experiment

    file = tmp_path / "mine.toml"
    file.write_text(tomli_w.dumps(table))
    with pytest.raises(UserError) as error:
        read_experiment(str(file))
    text = str(error.value).removeprefix(str(file))
    assert said in text
    assert "\n" not in text
    assert len(text) < 200
