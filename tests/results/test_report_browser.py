"""The report in a real browser: tables sort, images are shown, nothing is loaded; narrow, wide, dark and light."""

import base64
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from invented import write_grid

from fedsim.results import rebuild_results, write_report

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="no chromium and chromedriver here: apt-get install chromium chromium-driver",
    ),
]
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
KEYS = """
return [...arguments[0].tBodies[0].rows].map(row => {
  const cell = row.cells[arguments[1]];
  return [cell.dataset.value ?? null, cell.textContent.trim()];
});
"""
OVERFLOW = """
const wide = [...document.querySelectorAll("body *")].filter(one => {
  for (let box = one.parentElement; box; box = box.parentElement)
    if (getComputedStyle(box).overflowX === "auto") return false;
  return one.getBoundingClientRect().right > innerWidth + 1;
});
return [document.documentElement.scrollWidth - innerWidth, wide.map(one => one.tagName)];
"""
COLOURS = """
const of = one => getComputedStyle(one);
return [of(document.body).color, of(document.documentElement).backgroundColor, of(document.body).backgroundColor];
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of four methods on two targets with two seeds."""
    methods = {"fedavg": 0, "feddg-ga": 0.02, "csac": 0.03, "gperxan": 0.25}
    folder = write_grid(tmp_path_factory.mktemp("outputs"), methods, rounds=3, targets=("photo", "sketch"))
    rebuild_results(folder)
    return write_report(folder, {name: {"paper": f"paper of {name}", "discloses": "model updates"} for name in methods})


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Headless Chromium with an empty profile that logs messages and requests; ends with the tests."""
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in (*ARGUMENTS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser: Any, report: Path) -> Any:
    """The browser with the report freshly loaded."""
    browser.get_log("performance"), browser.get_log("browser")
    browser.get(report.as_uri())
    return browser


def look(page: Any, width: int, scheme: str) -> None:
    """Emulate a screen with this width and colour scheme."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def requests(page: Any) -> list[str]:
    """The addresses that the page has requested since it was loaded, without embedded data."""
    messages = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    asked = [entry["params"]["request"]["url"] for entry in messages if entry["method"] == "Network.requestWillBeSent"]
    return [address for address in asked if not address.startswith("data:")]


def test_nothing_is_fetched_and_nothing_complained_of(page, report):
    """The only request is for the page itself; its images are shown; the console is empty."""
    images = page.find_elements("tag name", "img")
    assert len(images) >= 7
    assert all(
        page.execute_script("return arguments[0].complete && arguments[0].naturalWidth > 300", i) for i in images
    )
    time.sleep(0.3)
    assert requests(page) == [report.as_uri()]
    assert page.get_log("browser") == []


def test_every_table_sorts_by_every_column(page):
    """Numbers sort as numbers, text as text, empty cells come last; a second click reverses the order."""
    page.execute_script("document.querySelectorAll('details').forEach(one => one.open = true)")
    tables = page.find_elements("css selector", "table.sortable")
    clicked = 0
    for table in tables:
        for column, head in enumerate(table.find_elements("css selector", "thead th")):
            page.execute_script("arguments[0].scrollIntoView({block: 'center', inline: 'center'})", head)
            seen = []
            for _ in range(2):
                head.find_element("tag name", "button").click()
                seen.append(head.get_attribute("aria-sort"))
                assert_sorted(page, page.execute_script(KEYS, table, column), seen[-1] == "descending")
            assert sorted(seen) == ["ascending", "descending"]
            clicked += 2
    assert len(tables) == 5  # results, costs, runs, settings, environment
    assert clicked > 50
    assert page.get_log("browser") == []


def assert_sorted(page: Any, cells: list[tuple[str | None, str]], down: bool) -> None:
    """Ascending: numbers by value, then texts as the browser's language orders them; empty cells last either way."""
    texts = [text if value is None else value for value, text in cells]
    filled = [text for text in texts if text]
    assert texts[len(filled) :] == [""] * (len(texts) - len(filled))
    upwards = filled[::-1] if down else filled
    numbers = [number(text) for text in upwards]
    found = [value for value in numbers if value is not None]
    assert numbers == sorted(found) + [None] * (len(numbers) - len(found))
    words = upwards[len(found) :]
    assert words == page.execute_script("return arguments[0].toSorted((a, b) => a.localeCompare(b))", words)


def number(text: str) -> float | None:
    """The number in a text; None if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return None


def test_numbers_are_not_sorted_as_text(page):
    """A column of the costs is tested in which the order of texts and the order of numbers differ."""
    table = page.find_elements("css selector", "table.sortable")[0]
    heads = [head.text for head in table.find_elements("css selector", "thead th")]
    column = heads.index("s/round")
    table.find_elements("css selector", "thead th button")[column].click()
    shown = [text for _, text in page.execute_script(KEYS, table, column)]
    assert [float(text) for text in shown] == sorted(map(float, shown), reverse=True)
    assert shown != sorted(shown, reverse=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_fits_the_screen_in_both_schemes(page, width, scheme):
    """The page does not scroll sideways, and text has a contrast of at least 7 with its background."""
    look(page, width, scheme)
    page.execute_script("document.querySelectorAll('details').forEach(one => one.open = true)")
    over, tags = page.execute_script(OVERFLOW)
    assert over <= 0
    assert tags == []
    text, _, back = page.execute_script(COLOURS)
    assert contrast(text, back) >= 7
    assert (luminance(back) < 0.1) == (scheme == "dark")
    folder = os.environ.get("FEDSIM_SCREENSHOTS")  # for a person who wants to see the page
    if folder:
        shot = page.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
        (Path(folder) / f"report-{width}-{scheme}.png").write_bytes(base64.b64decode(shot["data"]))


def luminance(colour: str) -> float:
    """Relative luminance (WCAG) of `rgb(r, g, b)`."""
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """WCAG contrast ratio."""
    dark, bright = sorted((luminance(one), luminance(other)))
    return (bright + 0.05) / (dark + 0.05)
