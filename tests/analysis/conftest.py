"""Fixtures of the tests of records, figures and reports."""

import shutil
from pathlib import Path

import pytest
from invented import write_grid
from matplotlib.figure import Figure

ARGUMENTS = (
    "headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "no-first-run", "disable-background-networking",
    "disable-component-update", "disable-sync",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Headless Chromium with an empty profile that logs messages and requests; ends with the tests."""
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in (*ARGUMENTS, f"user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_script_timeout(120)  # a machine that does other work, too
    yield driver
    driver.quit()


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
