"""Fixtures of the tests of records, figures and reports."""

import shutil
from pathlib import Path

import pytest
from invented import write_grid
from matplotlib.figure import Figure


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures are drawn but not rendered, which takes most of a report's time and is tested in test_report.py.

    They are collected in the list.
    """
    found = []

    def keep(figure: Figure, file: object, **_: object) -> None:
        found.append(figure)
        if isinstance(file, Path):
            file.touch()

    monkeypatch.setattr(Figure, "savefig", keep)
    return found


@pytest.fixture(scope="session")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of three methods on two targets with two seeds, which no test may change."""
    methods = {"fedavg": 0, "feddg-ga": 0.02, "csac": 0.03}
    return write_grid(tmp_path_factory.mktemp("outputs"), methods, rounds=4, targets=("photo", "sketch"))


@pytest.fixture
def own_grid(grid: Path, tmp_path: Path) -> Path:
    """A copy of these runs without those of feddg-ga."""
    return shutil.copytree(grid, tmp_path / "pacs", ignore=shutil.ignore_patterns("feddg-ga", "plots", "*.html"))
