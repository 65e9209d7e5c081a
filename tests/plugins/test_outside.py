"""Methods, parts, data sets, backbones and augmentations from outside work like fedsim's own."""

import sys
from importlib import metadata
from pathlib import Path

import pytest
from support import numbers, run_small, small_experiment

from fedsim.common.errors import UserError
from fedsim.data import benchmark
from fedsim.data.augment import make_transforms
from fedsim.methods.assembly import build_recipe, find_recipe
from fedsim.methods.registry import packages_of
from fedsim.methods.variants import method_label
from fedsim.models.backbones import find_backbone
from fedsim.run.plan import run_folder
from fedsim.settings import plugins
from fedsim.settings.experiment import Experiment, from_table

HERE = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    """The module is found in a folder that $FEDSIM_PLUGINS names."""
    monkeypatch.setenv("FEDSIM_PLUGINS", HERE)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != HERE])
    monkeypatch.delitem(sys.modules, "outside", raising=False)


class Installed:
    """An installed package that offers the module's names as entry points."""

    def __init__(self, monkeypatch):
        points = {
            "fedsim.methods": {"shrunk": "outside:shrunk"},
            "fedsim.parts": {"shrink": "outside:Shrink"},
            "fedsim.datasets": {"stripes": "outside:Stripes"},
            "fedsim.backbones": {"pixels": "outside:pixels"},
            "fedsim.augmentations": {"flipper": "outside:Flipper"},
        }
        offered = [metadata.EntryPoint(*own, group) for group, names in points.items() for own in names.items()]
        monkeypatch.setattr(plugins, "installed_points", lambda: metadata.EntryPoints(offered))
        monkeypatch.setattr(metadata, "packages_distributions", lambda: {"outside": ["striped-methods"]})
        monkeypatch.setattr(metadata, "version", lambda name: "1.5")
        plugins.entry_points.cache_clear()


@pytest.fixture
def installed(monkeypatch):
    """Pretend that `pip install striped-methods` was called."""
    yield Installed(monkeypatch)
    plugins.entry_points.cache_clear()


OUTSIDE = {
    "data": {
        "dataset": "outside:Stripes", "domains": [], "fraction": 1.0, "augment": "outside:Flipper", "image_size": 12,
    },
    "model": {"backbone": "outside:pixels"},
    "run": {"target": "both"},
}  # fmt: skip
PLAIN = {
    "data": {**OUTSIDE["data"], "dataset": "stripes", "augment": "flipper"},
    "model": {"backbone": "pixels"},
    "run": {"target": "both"},
}


def test_everything_from_outside_runs(tmp_path):
    """One run with a method, a data set, a backbone and an augmentation that fedsim does not know."""
    experiment = small_experiment(tmp_path, "outside:shrunk", **OUTSIDE)
    folder, _ = run_small(experiment)
    assert folder.parent.parent.name == "outside.shrunk"
    rows = numbers(folder / "rounds.csv")
    assert rows["train_loss"].iloc[-1] < rows["train_loss"].iloc[1]
    assert [package.module for package in packages_of(experiment)] == ["outside"] * 4
    assert packages_of(experiment)[0].requirement == "outside"  # a file in a folder: no package holds it


def test_a_part_from_outside_is_added_and_set():
    """It has a settings name like any part, and the label names its class."""
    settings = {"name": "fedavg", "add": ["outside:Shrink"], "shrink": {"weight": 0.3}}
    recipe = build_recipe(Experiment(method=settings))
    assert recipe.terms[0].weight == 0.3
    assert method_label(Experiment(method=settings)) == "fedavg@add=outside.Shrink,shrink.weight=0.3"
    both = find_recipe("outside:shrunk+fedbn")
    assert type(both.share).__name__ == "WithoutBatchNorm"
    with pytest.raises(UserError, match=r"method\.shrink\.weight"):
        build_recipe(Experiment(method={**settings, "shrink": {"weight": -1}}))


def test_entry_points_make_plain_names(installed, tmp_path):
    """An installed package's methods, parts and data sets are known by plain name, with their origin."""
    experiment = small_experiment(tmp_path, {"name": "shrunk", "shrink": {"weight": 0.2}}, **PLAIN)
    folder, _ = run_small(experiment)
    assert run_folder(experiment) == folder
    assert {package.requirement for package in packages_of(experiment)} == {"striped-methods==1.5"}
    assert plugins.origin("methods", "shrunk") == "striped-methods==1.5"
    assert plugins.origin("methods", "fedavg") == "fedsim"
    assert build_recipe(Experiment(method={"name": "fedavg", "add": ["shrink"]})).terms


def test_a_name_that_two_packages_give_is_refused(installed, monkeypatch):
    """Neither fedsim's own method nor the package's is taken without a word; module:name remains clear."""
    points = [metadata.EntryPoint("moon", "outside:shrunk", "fedsim.methods")]
    monkeypatch.setattr(plugins, "installed_points", lambda: metadata.EntryPoints(points))
    plugins.entry_points.cache_clear()
    with pytest.raises(UserError, match="'moon' could be fedsim's own or outside:shrunk"):
        find_recipe("moon")
    assert find_recipe("outside:shrunk").terms
    points.append(metadata.EntryPoint("moon", "other:moon", "fedsim.methods"))
    plugins.entry_points.cache_clear()
    points += [metadata.EntryPoint("mine", value, "fedsim.methods") for value in ("outside:shrunk", "other:moon")]
    with pytest.raises(UserError, match="'mine' could be other:moon or outside:shrunk"):
        find_recipe("mine")
    assert find_recipe("fedavg")


def test_methods_are_listed_with_their_origin(installed, capsys):
    """`fedsim methods` shows from which package a row comes."""
    from fedsim.commands.methods import show_methods

    show_methods()
    line = next(line for line in capsys.readouterr().out.splitlines() if "shrunk" in line)
    assert "striped" in line


def use(table):
    """Look up everything that an experiment names."""
    experiment = from_table(table)
    build_recipe(experiment)
    make_transforms(experiment.data, benchmark(experiment.data).channels)
    find_backbone(experiment.model)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"method": {"name": "nowhere:moon"}}, "start in the folder that holds it"),
        ({"method": {"name": "outside:shrnk"}}, "did you mean 'shrunk'"),
        ({"method": {"name": "outside:number"}}, "is int, not a Recipe"),
        ({"method": {"name": "outside:"}}, "not of the form"),
        ({"method": {"name": "fedavg", "add": ["outside:shrunk"]}}, "a part is a dataclass"),
        ({"method": {"name": "fedavg", "norm": "outside:Shrink"}}, "it is for terms"),
        ({"data": {"dataset": "outside:number"}}, "not a Benchmark"),
        ({"data": {"dataset": "dgits"}}, "did you mean 'digits'"),
        ({"data": {"augment": "flp"}}, "did you mean 'flip'"),
        ({"data": {"augment": "outside:number"}}, "not a function"),
        ({"model": {"backbone": "outside:number"}}, "not a Backbone"),
        ({"model": {"backbone": "resnet1"}}, "did you mean 'resnet18'"),
    ],
)
def test_what_is_not_there_is_one_line(table, said):
    """The error is one line for a missing module, a missing name in it, and an object of another kind."""
    with pytest.raises(UserError) as error:
        use(table)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_module_that_fails_to_import_is_one_line(tmp_path, monkeypatch):
    """The line contains the error of the user's own code, with its class."""
    (tmp_path / "broken_plugin.py").write_text("import math\nmath.sqrt(-1)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="importing broken_plugin failed: ValueError: math domain error"):
        find_recipe("broken_plugin:moon")


@pytest.mark.parametrize(
    "runtime", [pytest.param("ray", marks=pytest.mark.slow), pytest.param("flower", marks=pytest.mark.flower)]
)
def test_it_works_where_the_clients_are_other_processes(runtime, tmp_path):
    """Ray's workers and Flower's own engine import the module too; the numbers are the inline ones."""
    from fedsim.runtime.launch import launch

    own = {**OUTSIDE, "train": {"rounds": 1, "batch_size": 16, "lr": 0.05}}
    expected = numbers(launch(small_experiment(tmp_path / "inline", "outside:shrunk", **own)) / "rounds.csv")
    there = {**own, "run": {**own["run"], "runtime": runtime, "workers": 1 if runtime == "ray" else 0}}
    found = numbers(launch(small_experiment(tmp_path / runtime, "outside:shrunk", **there)) / "rounds.csv")
    assert found["target_loss"].iloc[-1] == pytest.approx(expected["target_loss"].iloc[-1], rel=1e-4)
