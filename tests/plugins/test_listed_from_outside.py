"""Lists show what installed packages offer, with its origin, and one that is broken hides no other."""

import sys
from importlib import metadata
from pathlib import Path

import pytest
from support import run_small, small_experiment

from fedsim.commands.data import show_datasets
from fedsim.commands.methods import show_methods
from fedsim.common.console import console
from fedsim.common.errors import UserError
from fedsim.methods.listing import listed
from fedsim.methods.table import METHODS
from fedsim.results import read_runs
from fedsim.run.plan import resolve
from fedsim.settings import plugins


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """An installed package with good and broken names."""
    points = {
        "fedsim.methods": {"shrunk": "outside:shrunk", "gone": "no_such_module:row", "odd": "outside:number"},
        "fedsim.datasets": {"stripes": "outside:Stripes", "lost": "no_such_module:Data"},
    }
    monkeypatch.setenv("FEDSIM_PLUGINS", str(Path(__file__).parent))
    monkeypatch.setattr(sys, "path", list(sys.path))
    offered = [metadata.EntryPoint(*own, group) for group, names in points.items() for own in names.items()]
    monkeypatch.setattr(plugins, "installed_points", lambda: metadata.EntryPoints(offered))
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"outside": ["striped-methods"]})
    monkeypatch.setattr(metadata, "version", lambda name: "1.5")
    monkeypatch.setattr(console, "width", 200)
    plugins.entry_points.cache_clear()
    yield
    plugins.entry_points.cache_clear()


def test_a_broken_method_is_listed_with_its_reason(capsys):
    """Earlier `fedsim methods` ended with the error of that one."""
    groups = listed()
    assert [row.name for row in groups["cannot be used"]] == ["gone", "odd"]
    assert sum(len(rows) for rows in groups.values()) == len(METHODS) + 3
    show_methods()
    said = capsys.readouterr().out
    assert "No module named 'no_such_module'" in said
    assert "is int, not a Recipe" in said
    assert "fedprox" in said


def test_data_sets_of_packages_are_shown(capsys):
    """In the list, and by plain name or module:name with their domains."""
    show_datasets("")
    said = capsys.readouterr().out
    assert "stripes (striped-methods==1.5)" in said
    assert "No module named 'no_such_module'" in said
    assert "pacs" in said
    for name in ("stripes", "outside:Stripes"):
        show_datasets(name)
        assert "across" in capsys.readouterr().out
    with pytest.raises(UserError, match="did you mean 'stripes'"):
        show_datasets("stripe")


def test_records_with_an_augmentation_that_is_not_installed_are_read(tmp_path):
    """Only a new run needs it; earlier every table over such a record ended with an error."""
    folder, _ = run_small(small_experiment(tmp_path, train={"rounds": 1}))
    file = folder / "experiment.toml"
    text = file.read_text()
    assert 'augment = "none"' in text
    file.write_text(text.replace('augment = "none"', 'augment = "flipper"'))
    (experiment,) = read_runs(tmp_path).experiments.values()
    assert experiment.data.augment == "flipper"
    with pytest.raises(UserError, match=r"data\.augment: unknown 'flipper'; did you mean 'flip'"):
        resolve(experiment)
