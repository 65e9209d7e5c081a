"""Methods, parts and networks from outside work like fedsim's own, those of the pages own-method and own-model too."""

import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support import numbers, run_small, small_experiment

from fedsim.commands.data import show_datasets
from fedsim.commands.methods import EXAMPLES, show_findings, show_methods, start_method
from fedsim.common.console import console
from fedsim.common.errors import UserError
from fedsim.data import benchmark
from fedsim.data.augment import make_transforms
from fedsim.methods.assembly import build_recipe, find_recipe
from fedsim.methods.listing import listed
from fedsim.methods.recipe import Recipe
from fedsim.methods.registry import packages_of
from fedsim.methods.table import METHODS
from fedsim.models.backbones import find_backbone
from fedsim.records import read_runs
from fedsim.runs.plan import resolve, run_folder
from fedsim.settings import plugins
from fedsim.settings.experiment import Experiment, from_table
from fedsim.testing.contract import PROPERTIES, findings

OUTSIDE = {
    "data": {
        "dataset": "outside:Stripes", "domains": [], "fraction": 1.0, "augment": "outside:Flipper", "image_size": 12,
    },
    "model": {"backbone": "outside:pixels"},
    "run": {"target": "both"},
}  # fmt: skip
PLAIN = {**OUTSIDE, "data": {**OUTSIDE["data"], "dataset": "stripes", "augment": "flipper"},
         "model": {"backbone": "pixels"}}  # fmt: skip


@pytest.fixture
def installed(offer, monkeypatch):
    offer({
        "methods": [("shrunk", "outside:shrunk"), ("gone", "no_such_module:row"), ("odd", "outside:number")],
        "parts": [("shrink", "outside:Shrink")],
        "datasets": [("stripes", "outside:Stripes"), ("lost", "no_such_module:Data")],
        "backbones": [("pixels", "outside:pixels")], "augmentations": [("flipper", "outside:Flipper")],
    })  # fmt: skip
    monkeypatch.setattr(console, "width", 200)


def test_everything_from_outside_runs(tmp_path):
    experiment = small_experiment(tmp_path, "outside:shrunk", **OUTSIDE)
    folder, _ = run_small(experiment)
    assert folder.parent.parent.name == "outside.shrunk"
    rows = numbers(folder / "rounds.csv")
    assert rows["train_loss"].iloc[-1] < rows["train_loss"].iloc[1]
    assert [package.module for package in packages_of(experiment)] == ["outside"] * 4
    assert packages_of(experiment)[0].requirement == "outside"  # a file in a folder: no package holds it


def test_entry_points_make_plain_names(installed, offer, tmp_path):
    method = {"name": "shrunk", "shrink": {"weight": 0.2}}
    experiment = small_experiment(tmp_path, method, **PLAIN, train={"rounds": 1})
    folder, _ = run_small(experiment)
    assert run_folder(experiment) == folder
    assert {package.requirement for package in packages_of(experiment)} == {"striped-methods==1.5"}
    assert plugins.origin("methods", "shrunk") == "striped-methods==1.5"
    assert plugins.origin("methods", "fedavg") == "fedsim"
    assert build_recipe(Experiment(method={"name": "fedavg", "add": ["shrink"]})).terms
    offer({"methods": [("shrunk", "outside:shrunk")], "datasets": [("stripes", "outside:Stripes")]})
    (read,) = read_runs(tmp_path).experiments.values()
    assert read.data.augment == "flipper"
    with pytest.raises(UserError, match=r"data\.augment: unknown 'flipper'; did you mean 'flip'"):
        resolve(read)


def test_a_name_that_two_packages_give_is_refused(offer):
    """Neither fedsim's own method nor the package's is taken without a word; module:name remains clear."""
    offer({"methods": [("moon", "outside:shrunk"), ("mine", "outside:shrunk"), ("mine", "other:moon")]})
    with pytest.raises(UserError, match="'moon' could be fedsim's own or outside:shrunk"):
        find_recipe("moon")
    with pytest.raises(UserError, match="'mine' could be other:moon or outside:shrunk"):
        find_recipe("mine")
    assert find_recipe("outside:shrunk").terms
    assert find_recipe("fedavg")


def test_lists_have_what_packages_offer_with_its_origin(installed, capsys):
    """One that is broken is listed with its reason, and hides no other."""
    groups = listed()
    assert [row.name for row in groups["cannot be used"]] == ["gone", "odd"]
    assert sum(len(rows) for rows in groups.values()) == len(METHODS) + 3
    show_methods()
    said = capsys.readouterr().out
    for words in ("No module named 'no_such_module'", "is int, not a Recipe", "fedprox"):
        assert words in said
    assert "striped" in next(line for line in said.splitlines() if "shrunk" in line)
    show_datasets("")
    said = capsys.readouterr().out
    for words in ("stripes (striped-methods==1.5)", "No module named 'no_such_module'", "pacs"):
        assert words in said
    for name in ("stripes", "outside:Stripes"):
        show_datasets(name)
        assert "across" in capsys.readouterr().out
    with pytest.raises(UserError, match="did you mean 'stripes'"):
        show_datasets("stripe")


@pytest.mark.parametrize(("table", "said"), [
    ({"method": {"name": "nowhere:moon"}}, "start in the folder that holds it"),
    ({"method": {"name": "outside:shrnk"}}, "did you mean 'shrunk'"),
    ({"data": {"dataset": "json:JSONDecodeError"}}, "does not derive from Benchmark"),
    ({"method": {"name": "outside:"}}, "not of the form"),
    ({"method": {"name": "fedavg", "add": ["outside:shrunk"]}}, "a part is a dataclass"),
    ({"method": {"name": "fedavg", "norm": "outside:Shrink"}}, "it is for terms"),
    ({"method": {"name": "broken_plugin:moon"}}, "importing broken_plugin failed: ValueError: math domain error"),
    ({"method": {"name": "broken_plugin"}}, "for an object of broken_plugin.py write broken_plugin:NAME"),
    ({"data": {"dataset": "outside:number"}}, "not a Benchmark; name a mapping {domain: Dataset}"),
    ({"data": {"augment": "outside:number"}}, "not a function"),
    ({"model": {"backbone": "outside:number"}}, "not a Backbone; name the class of the network"),
])  # fmt: skip
def test_what_is_not_there_is_one_line(tmp_path, monkeypatch, table, said):
    """A missing module, a missing name in it, an object of another kind, and an error of the user's own code."""
    (tmp_path / "broken_plugin.py").write_text("import math\nmath.sqrt(-1)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"\A.*{re.escape(said)}.*\Z"):  # noqa: PT012
        experiment = from_table(table)
        build_recipe(experiment)
        make_transforms(experiment.data, benchmark(experiment.data).channels)
        find_backbone(experiment.model)


HERE = Path(__file__).parent
FEW = {"data": {"domains": ["rot0", "rot30", "rot45"], "fraction": 0.05}, "train": {"rounds": 2, "batch_size": 16}}


@pytest.mark.parametrize(("page", "name"), [("own-method", "moon"), ("own-method", "cutmix"), ("own-model", "mynets")])
def test_the_page_has_the_code_of_the_file(page, name):
    """An included file is named, too: where the page is read as Markdown, its block is empty."""
    text = (HERE.parents[1] / "docs" / f"{page}.md").read_text()
    assert f"```python\n{(HERE / f'{name}.py').read_text()}```\n" in text
    for file in re.findall(r"^```\{(?:literal)?include\} \.\./(.+)$", text, re.MULTILINE):
        assert f"`{file}`" in text, file
    lines = "\n".join(f"holds  {check.__doc__}" for check in PROPERTIES)
    assert page != "own-method" or f"```text\n{lines}\n```\n" in text


@pytest.mark.parametrize(("own", "row", "train"), [
    ({"name": "moon:moon", "inserts": ["projection_head"]}, "moon", {}),
    ("scaffold:scaffold", "scaffold", {"momentum": 0.0}),
])  # fmt: skip
def test_the_same_formula_written_twice_gives_the_same_model(own, row, train, tmp_path):
    few = {**FEW, "train": {**FEW["train"], **train}}
    one, other = (
        load_file(run_small(small_experiment(tmp_path / name, method, **few))[0] / "last.safetensors")
        for name, method in (("own", own), ("row", row))
    )
    assert all(torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-6) for name in other)


@pytest.mark.slow  # the template that `fedsim new-method` writes is checked in the same way below
@pytest.mark.parametrize("method", ["moon:moon", "scaffold:scaffold", "cutmix:cutmix"])
def test_promises_of_every_method(method):
    assert {words: reason for words, reason in findings(method, ["train.momentum=0"]) if reason} == {}


def test_the_backbone_of_the_page_is_taken(tmp_path):
    """docs/own-model.md: methods that replace norms and that compare feature maps find its stages and levels."""
    few = {**FEW, "train": {"rounds": 1}}
    folder, _ = run_small(small_experiment(tmp_path, "gperxan+csac", model={"backbone": "mynets:small"}, **few))
    assert (folder / "summary.csv").is_file()


def test_new_method_writes_files_that_pass(tmp_path, monkeypatch):
    """`fedsim new-method` in an empty folder: the tests that it writes pass, and a name that is taken is refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    start_method("my_method", Path())
    module = Path("my_method.py")
    module.write_text(module.read_text().replace("MyMethodTerm", "Renamed"))  # as a user does
    assert "class Renamed(Term)" in module.read_text()
    written = importlib.import_module("test_my_method")
    tests = [test for name, test in vars(written).items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()
    for name in ("my_method", "test_my_method"):
        del sys.modules[name]
    taken = {"my_method": "exists already", "json": "would be imported instead", "My-Method": "small",
             "async": "no word of Python"}  # fmt: skip
    for name, said in taken.items():
        with pytest.raises(UserError, match=said):
            start_method(name, Path())
    with pytest.raises(UserError, match="no example for 'fuze'; did you mean 'fuse'"):
        start_method("another", Path(), "fuze")


@pytest.mark.parametrize("slot", sorted(file.stem for file in EXAMPLES.glob("*.txt")))
def test_the_example_of_every_slot_trains(slot, tmp_path, monkeypatch):
    """It fills that slot and trains; the test that is written next to it is Python."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    start_method(f"own_{slot}", Path(), slot)
    compile(Path(f"test_own_{slot}.py").read_text(), "test", "exec")
    row = find_recipe(f"own_{slot}:own_{slot}")
    assert getattr(row, slot) != getattr(Recipe(), slot)
    folder, _ = run_small(small_experiment("runs", f"own_{slot}:own_{slot}", **{**FEW, "train": {"rounds": 1}}))
    assert np.isfinite(numbers(folder / "rounds.csv")["train_loss"].iloc[1])
    del sys.modules[f"own_{slot}"]


def test_check_method_prints_a_line_per_property(capsys):
    """A method that does nothing fails in one line, and the command's exit code is 1."""
    assert not show_findings("fedprox", ["method.proximal.mu=0", "data.fraction=0.05", "train.iterations=1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines].count("fails") == 1
    assert "does nothing" in next(line for line in lines if line.startswith("fails"))
