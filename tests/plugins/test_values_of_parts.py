"""`[parts]` sets a part from outside under each of its names, in every method that has it, and never silently not."""

import json
import sys
from importlib import metadata
from pathlib import Path

import pandas as pd
import pytest

from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe
from fedsim.methods.registry import packages_of
from fedsim.methods.variants import method_label
from fedsim.parts.part import named_part
from fedsim.results.reading import Runs
from fedsim.settings import plugins
from fedsim.settings.experiment import parse_experiment, read_experiment

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The module `outside` is found, with an entry point for its part."""
    monkeypatch.setenv("FEDSIM_PLUGINS", f"{HERE}:{tmp_path}")
    monkeypatch.setattr(sys, "path", list(sys.path))
    points = [metadata.EntryPoint("my_shrink", "outside:Shrink", "fedsim.parts")]
    monkeypatch.setattr(plugins, "installed_points", lambda: metadata.EntryPoints(points))
    plugins.entry_points.cache_clear()
    yield
    plugins.entry_points.cache_clear()


@pytest.fixture
def read(tmp_path):
    """A function that reads an experiment with overrides."""
    (tmp_path / "mine.toml").write_text("[train]\nrounds = 1\n")
    return lambda *overrides: read_experiment(str(tmp_path / "mine.toml"), overrides)


SPELLINGS = ["outside:Shrink", '"outside:Shrink"', "my_shrink", "shrink"]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("method", [["outside:shrunk"], ["fedavg", 'method.add=["outside:Shrink"]']])
def test_each_spelling_sets_the_part(read, method, spelling):
    """Earlier only the settings name did; the other values were accepted and not used."""
    experiment = read(f"method.name={method[0]}", *method[1:], f"parts.{spelling}.weight=0.7")
    assert build_recipe(experiment).terms[0].weight == 0.7
    assert "0.7" not in method_label(experiment)  # the value is the experiment's, not a change of the method


@pytest.mark.parametrize("spelling", SPELLINGS[:3])
def test_a_method_without_the_part_goes_on_without_its_values(read, spelling):
    """One file serves both methods; the module's package is one that every machine needs."""
    experiment = read(f"parts.{spelling}.weight=0.7")
    assert build_recipe(experiment).terms == ()
    assert "outside" in [package.module for package in packages_of(experiment)]


def test_what_is_wrong_is_one_line(read):
    """A settings name that no shipped part has, two names of one part, and a value out of its range."""
    for overrides, said in [
        (["parts.shrink.weight=0.7"], r'write \[parts."module:Class"\] for shrink'),
        (["parts.my_shrink.weight=0.7", "parts.outside:Shrink.weight=0.1"], "are one part"),
        (["parts.outside:Shrink.weight=-1"], "weight"),
        (["parts.outside:Shrink.wait=1"], "has no field 'wait'"),
    ]:
        with pytest.raises(UserError, match=said):
            build_recipe(read(*overrides))


def test_two_runs_with_other_values_are_told_apart(read, tmp_path):
    """A table leaves out [parts] that a method does not have; the part is known under each of its names."""
    for seed, value in enumerate((0.1, 0.7)):
        folder = tmp_path / "out" / f"seed{seed}"
        folder.mkdir(parents=True)
        experiment = read("method.name=outside:shrunk", f"parts.outside:Shrink.weight={value}", f"run.seed={seed}")
        (folder / "experiment.toml").write_text(experiment.toml())
        (folder / "environment.json").write_text(json.dumps({"recipe": {"terms.shrink": {"weight": value}}}))
    files = sorted((tmp_path / "out").glob("*/experiment.toml"))
    experiments = {file.parent.name: parse_experiment(file.read_text()) for file in files}
    empty = pd.DataFrame()
    runs = Runs(empty, empty, empty, empty, experiments=experiments, folder=tmp_path / "out")
    assert runs.unused_parts == set()
    assert [named_part(key.strip('"')) for key in (*SPELLINGS, "proximal")] == ["shrink"] * 4 + ["proximal"]


def test_a_module_in_a_package_is_named_with_its_dots(read, tmp_path):
    """The dots of the module's name are not those between sections."""
    (tmp_path / "apackage").mkdir()
    (tmp_path / "apackage" / "inner.py").write_text("from outside import Shrink, shrunk\n")
    experiment = read("method.name=apackage.inner:shrunk", "parts.apackage.inner:Shrink.weight=0.7")
    assert build_recipe(experiment).terms[0].weight == 0.7
