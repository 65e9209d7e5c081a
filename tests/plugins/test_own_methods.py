"""The three methods of the page "Your own method in ten minutes": their formulas, and every method's properties."""

import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support import numbers, run_small, small_experiment

from fedsim.commands.contract import PROPERTIES, findings
from fedsim.commands.methods import show_findings, start_method
from fedsim.commands.new_method import EXAMPLES
from fedsim.common.errors import UserError
from fedsim.methods.assembly import find_recipe
from fedsim.methods.recipe import Recipe

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
FEW = {"data": {"domains": ["rot0", "rot30", "rot45"], "fraction": 0.05}, "train": {"rounds": 2, "batch_size": 16}}


@pytest.mark.parametrize(("page", "name"), [("own-method", "moon"), ("own-method", "cutmix"), ("own-model", "mynets")])
def test_the_page_has_the_code_of_the_file(page, name):
    """An included file is named, too: where the page is read as Markdown, its block is empty."""
    text = (DOCS / f"{page}.md").read_text()
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
    """It fills that slot and trains; the test that is written beside it is Python."""
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
