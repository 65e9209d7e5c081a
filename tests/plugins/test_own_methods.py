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
from fedsim.methods.assembly import build_recipe, find_recipe
from fedsim.methods.recipe import Recipe
from fedsim.settings.experiment import Experiment
from fedsim.settings.plugins import load
from strategies.parts import SERVER, ServerRound

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
FEW = {"data": {"domains": ["rot0", "rot30", "rot45"], "fraction": 0.05}, "train": {"rounds": 2, "batch_size": 16}}


@pytest.mark.parametrize(("name", "most"), [("moon", 60), ("scaffold", 90), ("cutmix", 39)])
def test_one_file_is_enough(name, most):
    """Nothing of fedsim is changed, and the file is short."""
    assert len((HERE / f"{name}.py").read_text().splitlines()) <= most


@pytest.mark.parametrize(("page", "name"), [("own-method", "moon"), ("own-method", "cutmix"), ("own-model", "mynets")])
def test_the_page_has_the_code_of_the_file(page, name):
    """The block on the page and the file that is tested here are equal."""
    assert f"```python\n{(HERE / f'{name}.py').read_text()}```\n" in (DOCS / f"{page}.md").read_text()


def test_an_included_file_is_named_too():
    """Where the page is read as Markdown, the block of an included file is empty."""
    for page in DOCS.glob("*.md"):
        text = page.read_text()
        for file in re.findall(r"^```\{(?:literal)?include\} \.\./(.+)$", text, re.MULTILINE):
            assert f"`{file}`" in text, f"{page.name}: {file}"


def test_the_page_shows_the_lines_of_the_check():
    """The properties are in the order and in the words of `fedsim check-method`."""
    lines = "\n".join(f"holds  {check.__doc__}" for check in PROPERTIES)
    assert f"```text\n{lines}\n```\n" in (DOCS / "own-method.md").read_text()


@pytest.mark.slow  # the template that `fedsim new-method` writes is checked in the same way below
@pytest.mark.parametrize("method", ["moon:moon", "scaffold:scaffold", "cutmix:cutmix"])
def test_promises_of_every_method(method):
    """They have all properties that `fedsim check-method` checks, with plain SGD."""
    assert {words: reason for words, reason in findings(method, ["train.momentum=0"]) if reason} == {}


def test_moon_from_outside_equals_the_row(tmp_path):
    """The same formula written twice gives the same model, on the network with its projection head."""
    own = {"name": "moon:moon", "inserts": ["projection_head"]}
    one, other = (
        load_file(run_small(small_experiment(tmp_path / name, method, **FEW))[0] / "last.safetensors")
        for name, method in (("own", own), ("row", "moon"))
    )
    assert all(torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-6) for name in other)


@pytest.mark.parametrize("method", ["gperxan", "csac"])
def test_the_backbone_of_the_page_is_taken(tmp_path, method):
    """docs/own-model.md: methods that replace norms and that compare feature maps find its stages and levels."""
    few = {**FEW, "train": {"rounds": 1}}
    folder, _ = run_small(small_experiment(tmp_path, method, model={"backbone": "mynets:small"}, **few))
    assert (folder / "summary.csv").is_file()


class Steps:
    """A round of one parameter w = 1 with the constant gradient 2, five steps of 0.1."""

    steps, lr = 5, 0.1

    def __init__(self, c, own):
        self.w = torch.nn.Parameter(torch.tensor([1.0]))
        self.records = {"control": {"w": c}} if c is not None else {}
        kept = {"control": {"w": torch.tensor([own])}} if own is not None else {}
        self.store = type("Store", (dict,), {"put": dict.__setitem__})(kept)
        self.scratch, self.before_step, self.sent = {}, [], {}

    def parameters(self):
        return {"w": self.w}

    def tensors(self, name, wanted_by):
        return {"w": torch.tensor([self.records[name]["w"]])}

    def send(self, name, tensors):
        self.sent |= tensors

    def run(self, part):
        """Take all steps of plain SGD."""
        part.begin(self)
        for _ in range(self.steps):
            self.w.grad = torch.tensor([2.0])
            for hook in self.before_step:
                hook()
            self.w.data -= self.lr * self.w.grad
        part.end(self)
        return float(self.w.detach()), float(self.store["control"]["w"]), float(self.sent["w"])


@pytest.mark.parametrize(
    ("c", "own", "w", "after"), [(None, None, 0.0, 2.0), (0.5, 2.0, 0.75, 2.0), (2.0, 2.0, 0.0, 2.0)]
)
def test_scaffold_on_numbers(c, own, w, after):
    """w = 1, gradient 2, five steps of 0.1: a client without and with variates, and c = c_k."""
    expected = pytest.approx((w, after, after - (own or 0.0)), abs=1e-5)
    assert Steps(c, own).run(load("scaffold:ControlledGradient", "")()) == expected


def test_scaffolds_control_variate_of_the_server():
    """c grows by the sum of the changes over all N clients, also when only two of four deliver."""
    bank = load("scaffold:Control", "")()
    server = ServerRound(1, 3, ["a", "b", "c", "d"], {"w": np.zeros(1, np.float32)}, parameters=["w"])
    changes = {"a": {"w": np.float32([2.0])}, "c": {"w": np.float32([4.0])}}
    merged = bank.merge({SERVER: {"w": np.float32([0.5])}}, changes, server)
    assert float(merged[SERVER]["w"][0]) == 2.0
    assert "expected" in bank.accept("a", {"w": np.zeros((1, 1), np.float32)}, server)


def test_scaffold_refuses_momentum(tmp_path):
    """The identity that it uses does not hold with momentum. Its bank is added automatically."""
    with pytest.raises(UserError, match="momentum"):
        build_recipe(small_experiment(tmp_path, "scaffold:scaffold"))
    settings = {"name": "fedavg", "add": ["scaffold:ControlledGradient"]}
    assert [bank.name for bank in build_recipe(Experiment(method=settings)).banks] == ["control"]


def test_new_method_writes_files_that_pass(tmp_path, monkeypatch):
    """`fedsim new-method` in an empty folder: the tests that it writes pass, and a name that is taken is refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    start_method("my_method", Path())
    written = importlib.import_module("test_my_method")
    tests = {name: test for name, test in vars(written).items() if name.startswith("test_")}
    assert len(tests) == 2
    for test in tests.values():
        test()
    for name in ("my_method", "test_my_method"):
        del sys.modules[name]
    for name, said in (
        ("my_method", "exists already"),
        ("json", "would be imported instead"),
        ("My-Method", "small"),
        ("async", "no word of Python"),  # a module of that name cannot be imported
    ):
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
    assert not show_findings("fedprox", ["method.proximal.mu=0", "data.fraction=0.05"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines].count("fails") == 1
    assert "does nothing" in next(line for line in lines if line.startswith("fails"))
