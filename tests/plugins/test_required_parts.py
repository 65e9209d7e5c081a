"""A part from outside may require another one by each of its names."""

import sys
from importlib import metadata
from pathlib import Path

import pytest

from fedsim.methods.assembly import find_recipe
from fedsim.methods.variants import method_label
from fedsim.settings import plugins
from fedsim.settings.experiment import Experiment

MODULE = """from dataclasses import dataclass
from clients.parts import Term
from fedsim.methods.recipe import Recipe

@dataclass(frozen=True)
class Needs(Term):
    requires = {{"terms": "{name}"}}

row = Recipe(terms=(Needs(),), paper="a test")
"""


@pytest.mark.parametrize("name", ["outside:Shrink", "my_shrink"])
def test_it_is_added_once(name, tmp_path, monkeypatch):
    """Earlier such a name was compared with settings names, and the part was added without end."""
    module = f"requiring_{name[-4:].lower()}"
    (tmp_path / f"{module}.py").write_text(MODULE.format(name=name))
    monkeypatch.setenv("FEDSIM_PLUGINS", f"{tmp_path}:{Path(__file__).parent}")
    monkeypatch.setattr(sys, "path", list(sys.path))
    points = [metadata.EntryPoint("my_shrink", "outside:Shrink", "fedsim.parts")]
    monkeypatch.setattr(plugins, "installed_points", lambda: metadata.EntryPoints(points))
    plugins.entry_points.cache_clear()
    try:
        assert [type(part).__name__ for part in find_recipe(f"{module}:row").terms] == ["Needs", "Shrink"]
        assert [type(part).__name__ for part in find_recipe(f"{module}:row+outside:shrunk").terms] == [
            "Needs",
            "Shrink",
        ]
        assert method_label(Experiment(method={"name": f"{module}:row"})) == f"{module}:row"
    finally:
        plugins.entry_points.cache_clear()
