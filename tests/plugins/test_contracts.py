"""What a setting names as module:name is known to fit its slot before anything of it is called."""

import re
import sys

import pytest
from torch import Tensor

from fedsim.common.errors import UserError
from fedsim.data import find_dataset
from fedsim.data.augment import find_augmentation
from fedsim.methods.assembly import build_recipe
from fedsim.methods.recipe import Recipe
from fedsim.methods.registry import find_part
from fedsim.models import find_backbone
from fedsim.models.layout import Backbone
from fedsim.records.callbacks import trackers
from fedsim.settings.experiment import from_table
from fedsim.settings.plugins import load

PLANTED = """from pathlib import Path

CALLED = Path(__file__).with_name("called")


def act(*given, **named):
    CALLED.touch()


class Act:
    def __init__(self, *given, **named):
        act()


class Loose:
    def __getattr__(self, name):
        return act


loose = Loose()
"""
MAKERS = """import torch
from torch import Tensor, nn
from fedsim.data.row import Benchmark
from fedsim.methods.recipe import Recipe
from fedsim.models.layout import Backbone, Layout


def row() -> Recipe:
    return Recipe(paper="a test")


def quoted() -> "Recipe":
    return Recipe(paper="a test")


def silent():
    return Recipe(paper="a test")


def lying() -> Recipe:
    return 3


def needy(name: str) -> Recipe:
    return Recipe(paper=name)


def data() -> Benchmark:
    return Benchmark("own", "Own", ("a", "b"), ("x", "y"), 1)


def net() -> Backbone:
    return Backbone(lambda image_size, channels: nn.Flatten(), Layout(8))


def flipped(images: Tensor) -> Tensor:
    return images.flip(3)


class Flip(nn.Module):
    def forward(self, images):
        return images.flip(3)


class Told:
    def on_start(self, experiment, folder): ...
    def on_round(self, row, clients): ...
    def on_end(self, summary): ...


def told() -> Told:
    return Told()
"""
# Every setting that takes module:name, what reads it, and the contract that a message names.
DOORS = {
    "method.name": (lambda own: build_recipe(own), "Recipe"),
    "data.dataset": (lambda own: find_dataset(own.data.dataset), "Benchmark"),
    "data.augment": (lambda own: find_augmentation(own.data.augment), "Tensor"),
    "model.backbone": (lambda own: find_backbone(own.model), "Backbone"),
    "run.callbacks": (lambda own: trackers(own.run), "RunCallback"),
    "method.step": (build_recipe, "contract"),
    "method.terms": (build_recipe, "contract"),
    "method.add": (build_recipe, "contract"),
    "parts": (build_recipe, "contract"),
}


def table(door: str, name: str) -> dict:
    """The settings in which one door has a name."""
    section, _, key = door.partition(".")
    value = [name] if key in ("callbacks", "terms", "add") else name
    own = {section: {key: value}} if key else {"parts": {name: {"weight": 0.1}}}
    return {"method": {"name": "fedavg"}, **own} if section != "method" else {"method": {"name": "fedavg", key: value}}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text(PLANTED)
    (tmp_path / "makers.py").write_text(MAKERS)
    monkeypatch.setenv("FEDSIM_PLUGINS", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("planted", "makers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in ("planted", "makers"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", ["planted:act", "planted:Act", "planted:loose", "os:abort", "tempfile:mkdtemp",
                                  "tempfile:TemporaryDirectory", "subprocess:Popen"])  # fmt: skip
def test_what_does_not_fit_is_refused_and_not_called(door, name, folder):
    read, contract = DOORS[door]
    with pytest.raises(UserError, match=rf"\A.*{re.escape(name)}.*{contract}.*\Z"):
        read(from_table(table(door, name)))
    assert not (folder / "called").exists()


def test_a_function_that_says_what_it_returns_is_called():
    assert isinstance(build_recipe(from_table(table("method.name", "makers:row"))), Recipe)
    assert isinstance(build_recipe(from_table(table("method.name", "makers:quoted"))), Recipe)
    assert find_dataset("makers:data").title == "Own"
    assert isinstance(find_backbone(from_table(table("model.backbone", "makers:net")).model), Backbone)
    for name in ("makers:Told", "makers:told"):
        (made,) = trackers(from_table(table("run.callbacks", name)).run)
        assert type(made).__name__ == "Told"


def test_an_augmentation_says_that_it_returns_a_tensor_or_is_a_module_of_torch():
    for name in ("makers:flipped", "makers:Flip", "torchvision.transforms.functional:hflip"):
        flipped = find_augmentation(name)(Tensor([[[[1.0, 2.0]]]]))
        assert flipped.tolist() == [[[[2.0, 1.0]]]]


@pytest.mark.parametrize(("name", "said"), [
    ("makers:silent", "does not say what it returns; if it makes one, write `def silent() -> Recipe:`"),
    ("makers:lying", "is int, not a Recipe"),
    ("makers:needy", "cannot be called without arguments"),
])  # fmt: skip
def test_a_function_that_does_not_fit_is_one_line(name, said):
    with pytest.raises(UserError, match=rf"\A.*{re.escape(said)}.*\Z"):
        build_recipe(from_table(table("method.name", name)))


def test_every_part_is_a_class_of_its_slot():
    """A class is looked at before it is made, and so is the class that another part requires by name."""
    with pytest.raises(UserError, match="a part is a dataclass that derives from a slot's contract"):
        find_part("planted:Act", "terms")


@pytest.mark.parametrize("name", ["../evil:x", "/etc/evil:x", "evil.:x", ".evil:x", "evil:x.y", "evil:", ":x", "a b:x"])
def test_a_module_is_named_by_words_and_never_by_a_path(name):
    with pytest.raises(UserError, match=r"is not of the form package\.module:name"):
        load(name, "model.backbone")
