"""The browser of the tests of reports."""

import shutil

import pytest
from record_fixtures import grid, own_grid, unrendered  # noqa: F401

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
