"""Parts are known without a second list; a recipe that differs says so; `fedsim methods` lists every row once."""

import dataclasses
import re
import shlex
from dataclasses import dataclass
from typing import Annotated

import pytest
from pydantic import Field
from support import run_small, small_experiment

from clients.parts import Report, Term
from fedsim.analysis import compare
from fedsim.commands.methods import show_method, show_methods, show_names
from fedsim.common.console import console
from fedsim.common.errors import UserError
from fedsim.methods import table as methods
from fedsim.methods.assembly import assemble, build_recipe, find_recipe
from fedsim.methods.listing import GROUPS, groups_text
from fedsim.methods.recipe import SLOTS, Recipe
from fedsim.methods.registry import FOLDERS, parts_by_slot
from fedsim.methods.table import METHODS
from fedsim.methods.variants import method_label, recipe_record, same_method
from fedsim.parts.part import part_name
from fedsim.records import read_runs
from fedsim.runs.conflicts import refuse_other_settings
from fedsim.runs.plan import run_folder
from fedsim.settings.experiment import Experiment, from_table, parse_override


def label(parts=None, **method):
    return method_label(from_table({"method": {"name": "fedavg", **method}, "parts": parts or {}}))


MU = {"proximal": {"mu": 0.5}}


@pytest.mark.parametrize(("method", "expected"), [
    ({}, "fedavg"),
    ({"add": "guiding_head", "guiding_head": {"weight": 0.5}}, "fedavg@add=guiding_head"),
    ({"add": ["guiding_head"], "guiding_head": {"weight": 1}}, "fedavg@add=guiding_head,guiding_head.weight=1"),
    ({"name": "fedprox", "proximal": {"mu": 0.01}}, "fedprox@proximal.mu=0.01"),
    ({"name": "fedprox", "proximal": {"mu": 0.1}}, "fedprox"),
    ({"name": "fedprox", "terms": []}, "fedprox@terms=none"),
    ({"add": ["uniform"]}, "fedavg@weights=uniform"),
    ({"name": "ditto", "step": "adversarial_reference"}, "ditto@step=adversarial_reference"),  # and no other slot
    ({"name": "ccst", "augment": "none", "banks": []}, "ccst@banks=none,augment=none"),
    ({"name": "gperxan", "xan": {"stages": [1, 2]}}, "gperxan@xan.stages=1+2"),
    # [parts] belongs to the data set; a setting of the method is compared with these values.
    ({"parts": MU, "name": "fedprox", **MU}, "fedprox"),
    ({"parts": MU, "name": "fedprox", "proximal": {"mu": 0.1}}, "fedprox@proximal.mu=0.1"),
    ({"parts": MU, "add": ["proximal"]}, "fedavg@add=proximal"),
])  # fmt: skip
def test_the_difference_is_readable_and_the_same_for_equal_recipes(method, expected):
    """It names the differences in the order of the slots; settings with the same meaning give the same text."""
    assert label(**method) == expected


def test_long_words_and_paths_stay_one_folder_and_apart():
    paths = ("a/b", "a_b", "x" * 300)
    one, other, long = (label(name="ccst", cross_client_style={"encoder_weights": path}) for path in paths)
    assert ("/" in one, one == other, len(long) < 150) == (False, False, True)


def test_a_changed_recipe_has_its_own_folder_and_row(tmp_path):
    """A point of a grid with the row's own value is the row's run, because recipes are compared and not texts."""
    plain = small_experiment(tmp_path, "fedprox", train={"rounds": 1})
    changed = small_experiment(tmp_path, {"name": "fedprox", "add": ["guiding_head"]}, train={"rounds": 1})
    folder, _ = run_small(plain)
    run_small(changed)
    assert run_folder(changed).parent.parent.name == "fedprox@terms=guiding_head+proximal"
    assert sorted(compare(read_runs(tmp_path)).methods["label"]) == ["fedprox", "fedprox@terms=guiding_head+proximal"]
    same, other = (plain.replace(method={"proximal": {"mu": mu}}) for mu in (0.1, 0.2))
    assert (same_method(plain, same), same_method(plain, other)) == (True, False)
    assert run_folder(same) == run_folder(plain)
    refuse_other_settings(folder, same, build_recipe(same))
    with pytest.raises(UserError, match=r"method\.proximal"):
        refuse_other_settings(folder, other, build_recipe(other))


def test_the_values_without_the_settings_are_those_of_the_row():
    """Those of the row and not of the class, in the tables in which the settings give them."""

    def recorded(**method):
        experiment = from_table({"method": {"name": "perada", **method}, "parts": {"proximal": {"mu": 1.0}}})
        return recipe_record(experiment, build_recipe(experiment))

    found = recorded(ditto={"lam": 0.5})
    assert found["defaults"] == {"method": {"ditto": {"lam": 0.2}}}
    assert found["recipe"]["companions.ditto"]["lam"] == 0.5
    assert set(recorded()) == {"recipe"}


def test_the_names_of_the_short_list_are_those_of_the_table(capsys):
    assert GROUPS.read_text() == groups_text(), "run: python -m fedsim.methods.listing"
    show_names()
    assert "server (16): fedbn, silobn" in capsys.readouterr().out
    show_methods(group="model")
    assert "model (3)" in (out := capsys.readouterr().out)
    assert "server (" not in out
    with pytest.raises(UserError, match="did you mean 'server'"):
        show_methods(group="serve")


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_can_be_copied_at_80_columns(monkeypatch, capsys, name):
    """What follows --set, as a shell reads it, gives the same recipe; no line is longer than the terminal."""
    monkeypatch.setattr(console, "width", 80)
    show_method(name)
    lines = capsys.readouterr().out.splitlines()
    method = {"name": name}
    for words in (shlex.split(line) for line in lines if line.startswith("  --set ")):
        key, value = parse_override(words[1])
        method.setdefault(key.split(".")[1], {})[key.split(".")[2]] = value
    recipe = find_recipe(name)
    assert assemble(method, {}) == recipe
    for _, part in recipe.pairs:
        assert method.get(part_name(part), {}).keys() == {field.name for field in dataclasses.fields(part)}
    assert max(len(line) for line in lines if "fedsim run" not in line and "://" not in line) <= 80


@dataclass(frozen=True)
class Watcher(Term, Report):
    weight: Annotated[float, Field(ge=0)] = 0.5

    def begin(self, round):
        """Add nothing."""
        return


def recipe_of(**method):
    return build_recipe(Experiment(method={"name": "fedavg", **method}))


def test_every_slot_has_a_folder_whose_parts_are_known():
    assert list(FOLDERS) == list(SLOTS)
    known = parts_by_slot()
    assert {"coordinate_median", "private_mean", "trimmed_mean"} <= set(known["fuse"])
    for recipe in methods.METHODS.values():
        assert all(part_name(part) in known[slot] for slot, part in recipe.pairs)


def test_a_part_that_a_row_uses_is_known_to_the_settings_in_both_of_its_slots(monkeypatch):
    """Without a second list, its fields can be set, and it can be added to another row."""
    monkeypatch.setitem(methods.METHODS, "watched", Recipe(terms=(Watcher(),), reports=(Watcher(),), paper="none"))
    for recipe, weight in (
        (recipe_of(name="watched", watcher={"weight": 0.25}), 0.25),
        (recipe_of(add=["watcher"]), 0.5),
        (recipe_of(add=["watcher"], watcher={"weight": 2}), 2),
    ):
        assert (recipe.terms, recipe.reports) == ((Watcher(weight),), (Watcher(weight),))


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
    ("deepall weights=uniform", "pooled on one client"),
    ("fedavg+fedprox", "fedavg adds nothing to fedprox"),
    ("fedbn without_batch_norm.upload=false", "no model for the unseen domain"),
    ("fedig-a norm=batch_norm", "norm layers have adapters for unseen domains, which does not hold here"),
    ("fada inserts=['projector']", "a part of fada needs disentangler there"),
    ("fada weights=uniform", "target_attention visits for the weights of method.weights alone"),
    ("fedavg weights=uniform add=['generalization_adjustment']", "uniform and generalization_adjustment are both for"),
])  # fmt: skip
def test_settings_of_parts_that_cannot_be_are_one_line(words, said):
    name, *settings = words.split(" ")
    method = {"name": name}
    for key, value in map(parse_override, settings):
        part, _, field = key.partition(".")
        method[part] = {field: value} if field else value
    with pytest.raises(UserError, match=rf"\A.*{re.escape(said)}.*\Z"):
        recipe_of(**method)


@pytest.mark.parametrize(("parts", "said"), [
    ({"semantic_calibration": {"acquire": 3}}, "parts.semantic_calibration has no field 'acquire'"),
    ({"semantic_calibraton": {"acquire_epochs": 3}}, "did you mean 'semantic_calibration'"),
])  # fmt: skip
def test_the_table_of_parts_is_checked_for_every_method(parts, said):
    with pytest.raises(UserError, match=rf"\A.*(?:{said}).*\Z"):
        build_recipe(from_table({"method": {"name": "fedavg"}, "parts": parts}))
