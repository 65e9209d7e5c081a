"""Modules of this folder stand for a user's own code, and for installed packages."""

import sys
from importlib import metadata
from pathlib import Path

import pytest

from fedsim.settings import plugins

HERE = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """The modules are found in a folder that $FEDSIM_PLUGINS names, and not in Python's own folders."""
    monkeypatch.setenv("FEDSIM_PLUGINS", HERE)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != HERE])
    for name in ("outside", "ownrow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    plugins.entry_points.cache_clear()


@pytest.fixture
def offer(monkeypatch):
    """Function ({group: {name: module:name}}): an installed package striped-methods 1.5 offers these names."""

    def install(points):
        offered = [metadata.EntryPoint(*own, f"fedsim.{group}") for group in points for own in points[group]]
        monkeypatch.setattr(plugins, "installed_points", lambda: metadata.EntryPoints(offered))
        monkeypatch.setattr(plugins, "installed_packages", lambda: {"outside": ["striped-methods"]})
        monkeypatch.setattr(metadata, "version", lambda name: "1.5")
        plugins.entry_points.cache_clear()

    return install
