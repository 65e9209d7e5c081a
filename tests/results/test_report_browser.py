"""The report in a real browser: tables sort, images are shown, nothing is loaded; narrow, wide, dark and light."""

import json
import re
import shutil
import time

import pytest
from invented import write_grid

from fedsim.results import write_report

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="no chromium and chromedriver here: apt-get install chromium chromium-driver",
    ),
]
ARGUMENTS = (
    "headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "no-first-run", "disable-background-networking",
    "disable-component-update", "disable-sync",
)  # fmt: skip
CLICK_AND_READ = """
const [head, column] = arguments;
head.querySelector("button").click();
const cells = [...head.closest("table").tBodies[0].rows].map(row => row.cells[column]);
return [head.ariaSort, cells.map(cell => cell.dataset.value ?? cell.textContent.trim())];
"""
IN_THE_BROWSERS_ORDER = "return arguments[0].toSorted((a, b) => a.localeCompare(b))"
OVERFLOW = """
const wide = [...document.querySelectorAll("body *")].filter(one => {
  for (let box = one.parentElement; box; box = box.parentElement)
    if (getComputedStyle(box).overflowX === "auto") return false;
  return one.getBoundingClientRect().right > innerWidth + 1;
});
return [document.documentElement.scrollWidth - innerWidth, wide.map(one => one.tagName)];
"""
COLOURS = "const of = getComputedStyle(document.body); return [of.color, of.backgroundColor];"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    methods = {"fedavg": 0, "feddg-ga": 0.02, "csac": 0.03, "gperxan": 0.25}
    folder = write_grid(tmp_path_factory.mktemp("outputs"), methods, rounds=3, targets=("photo", "sketch"))
    return write_report(folder, {name: {"paper": f"paper of {name}", "discloses": "model updates"} for name in methods})


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
    yield driver
    driver.quit()


@pytest.fixture
def page(browser, report):
    """The browser with the report freshly loaded, and all that is folded opened."""
    browser.get_log("performance"), browser.get_log("browser")
    browser.get(report.as_uri())
    browser.execute_script("document.querySelectorAll('details').forEach(one => one.open = true)")
    return browser


def requests(page):
    messages = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    asked = [entry["params"]["request"]["url"] for entry in messages if entry["method"] == "Network.requestWillBeSent"]
    return [address for address in asked if not address.startswith("data:")]


def test_nothing_is_fetched_and_nothing_complained_of(page, report):
    """The only request is for the page itself; its images are shown; the console is empty."""
    images = page.find_elements("tag name", "img")
    assert len(images) >= 7
    shown = "return arguments[0].complete && arguments[0].naturalWidth > 300"
    assert all(page.execute_script(shown, image) for image in images)
    time.sleep(0.3)
    assert requests(page) == [report.as_uri()]
    assert page.get_log("browser") == []


def number(text):
    try:
        return float(text)
    except ValueError:
        return None


def test_every_table_sorts_by_every_column(page):
    """Numbers sort as numbers, texts as the browser's language orders them, empty cells last; then the other way."""
    tables, otherwise = page.find_elements("css selector", "table.sortable"), 0
    assert len(tables) == 5  # results, costs, runs, settings, environment
    for table in tables:
        for column, head in enumerate(table.find_elements("css selector", "thead th")):
            orders = dict(page.execute_script(CLICK_AND_READ, head, column) for _ in range(2))
            assert set(orders) == {"ascending", "descending"}
            for order, texts in orders.items():
                filled = [text for text in texts if text]
                assert texts[len(filled) :] == [""] * (len(texts) - len(filled))
                upwards = filled[::-1] if order == "descending" else filled
                numbers = [found for text in upwards if (found := number(text)) is not None]
                assert list(map(number, upwards)) == sorted(numbers) + [None] * (len(upwards) - len(numbers))
                words = upwards[len(numbers) :]
                assert words == page.execute_script(IN_THE_BROWSERS_ORDER, words)
                otherwise += upwards != page.execute_script(IN_THE_BROWSERS_ORDER, upwards)
    assert otherwise  # there are columns in which numbers would be in another order as texts
    assert page.get_log("browser") == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_fits_the_screen_in_both_schemes(page, width, scheme):
    """The page does not scroll sideways, and text has a contrast of at least 7 with its background."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    over, tags = page.execute_script(OVERFLOW)
    assert over <= 0
    assert tags == []
    text, back = map(luminance, page.execute_script(COLOURS))
    assert (max(text, back) + 0.05) / (min(text, back) + 0.05) >= 7  # WCAG
    assert (back < 0.1) == (scheme == "dark")


def luminance(colour):
    """Relative luminance (WCAG) of `rgb(r, g, b)`."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))
