"""The report in a real browser: it sorts, filters, hovers, isolates, leads to runs, loads nothing, fits and prints."""

import json
import re
import shutil
import time
from itertools import product

import pytest
from invented import write_grid

from fedsim.analysis.report import write_report

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="no chromium and chromedriver here: apt-get install chromium chromium-driver",
    ),
]
TABLES = "table.sortable"
FIGURES = "return [...document.querySelectorAll('.charts .plot')]"
SHOWN = "return arguments[0].data.filter(trace => trace.visible !== 'legendonly').map(trace => trace.name)"
OVERFLOW = """
const wide = [...document.querySelectorAll("body *")].filter(one => {
  for (let box = one.parentElement; box; box = box.parentElement)
    if (getComputedStyle(box).overflowX === "auto") return false;
  const inside = one.parentElement.closest("svg"); // which cuts what does not fit
  return !inside && one.getBoundingClientRect().right > innerWidth + 1;
});
return [Math.max(document.documentElement.scrollWidth - innerWidth, 0), wide.map(one => one.tagName)];
"""
OVERLAP = """
const names = [...arguments[0].querySelectorAll(".textpoint text")].filter(one => one.textContent);
const boxes = names.map(one => one.getBoundingClientRect()), apart = (one, other) => one.right < other.left
  || other.right < one.left || one.bottom < other.top || other.bottom < one.top;
return names.filter((_, place) => boxes.some((box, other) => other < place && !apart(box, boxes[place])))
  .map(one => one.textContent);
"""
SIDEWAYS = """
const table = document.querySelector("table.methods");
return table.offsetWidth - table.closest(".dt-layout-table").clientWidth;
"""
# The tables of up to eight columns that scroll sideways, by their headings.
NARROW_TABLES = """
return [...document.querySelectorAll(".dt-layout-table > *, .scroll")]
  .filter(box => box.scrollWidth > box.clientWidth + 1)
  .map(box => [...box.querySelectorAll("thead tr:first-child th")].map(head => head.innerText))
  .filter(heads => heads.length <= 8);
"""
COLOURS = "const of = getComputedStyle(document.body); return [of.color, of.backgroundColor];"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    methods = {"fedavg": 0, "feddg-ga": 0.02, "csac": 0.03, "gperxan": 0.25}
    folder = write_grid(tmp_path_factory.mktemp("outputs"), methods, rounds=3, targets=("photo", "sketch"))
    shutil.rmtree(folder / "csac" / "sketch")
    notes = {name: {"paper": f"paper of {name}", "group": "server" if "ga" in name else "clients"} for name in methods}
    return write_report(folder, notes)


@pytest.fixture
def page(browser, report):
    """The browser with the report freshly loaded and drawn, and all that is folded opened."""
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.get("about:blank")
    browser.get_log("performance"), browser.get_log("browser")
    browser.get(report.as_uri())
    until(browser, "return document.documentElement.dataset.ready")
    browser.execute_script("document.querySelectorAll('details').forEach(one => one.open = true)")
    return browser


def until(page, script, *arguments):
    """What a script returns as soon as it is true."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(page, 60, 0.05).until(lambda driver: driver.execute_script(script, *arguments))


def becomes(wanted, read, *arguments):
    """Wait until a function returns what is wanted."""
    deadline = time.monotonic() + 60
    while (found := read(*arguments)) != wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found == wanted


def column_of(page, table, name):
    """The number and the head of a column."""
    heads = table.find_elements("css selector", "thead th")
    read = "return arguments[0].map(one => one.querySelector('.dt-column-title').textContent)"
    texts = page.execute_script(read, heads)
    return texts.index(name), heads[texts.index(name)]


def texts_of(page, table, name):
    column, _ = column_of(page, table, name)
    read = "return [...arguments[0].tBodies[0].rows].map(row => row.cells[arguments[1]].textContent)"
    return page.execute_script(read, table, column)


def requests(page):
    messages = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    asked = [entry["params"]["request"]["url"] for entry in messages if entry["method"] == "Network.requestWillBeSent"]
    return [address for address in asked if not address.startswith("data:")]


def test_loads_nothing_and_fits_the_screen_in_both_schemes_and_on_paper(page, report):
    """The only request is for the page itself. It does not scroll sideways, and text has a contrast of at least 7."""
    plots = page.execute_script(FIGURES)
    assert len(plots) == 3
    assert all(plot.find_elements("css selector", ".main-svg") for plot in plots)
    for width, scheme in product((400, 1600), ("light", "dark")):
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        becomes([0, []], page.execute_script, OVERFLOW)
        assert width < 1600 or page.execute_script(SIDEWAYS) <= 0
        text, back = map(luminance, page.execute_script(COLOURS))
        assert (max(text, back) + 0.05) / (min(text, back) + 0.05) >= 7, (width, scheme)  # WCAG
        assert (back < 0.1) == (scheme == "dark")
    widths = "return arguments[0].map(plot => plot.querySelector('svg').clientWidth)"
    before = page.execute_script(widths, plots)
    page.execute_script("dispatchEvent(new Event('beforeprint'))")
    becomes([680] * 3, page.execute_script, widths, plots)
    assert luminance(page.execute_script(COLOURS)[1]) > 0.9  # though the scheme is dark
    page.execute_script("dispatchEvent(new Event('afterprint'))")
    becomes(before, page.execute_script, widths, plots)
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert requests(page) == [report.as_uri()]
    assert page.get_log("browser") == []


def test_a_narrow_screen_begins_with_what_says_how_good_a_method_is(browser, report):
    """On 400 pixels the first table has the average and its difference; a button shows the other columns."""
    metrics = {"width": 400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get("about:blank")
    browser.get(report.as_uri())
    until(browser, "return document.documentElement.dataset.ready")
    titles = "document.querySelectorAll('table.methods thead .dt-column-title')"
    heads = f"return [...{titles}].map(head => head.textContent.trim())"
    browser.execute_script("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert browser.execute_script(NARROW_TABLES) == []
    assert browser.execute_script(heads) == ["Method", "Average", "Δ fedavg", "p"]
    button = browser.find_element("css selector", ".dt-buttons button")
    assert button.text.split("\n")[0].startswith("columns: 4 of ")
    button.click()
    browser.find_elements("css selector", ".dt-button-collection button")[1].click()
    assert len(browser.execute_script(heads)) == 5


def choose(page, table, name, value):
    """Filter a column: by a choice of its list, or by a number of its search."""
    _, head = column_of(page, table, name)
    head.find_element("css selector", ".dtcc-button").click()
    until(page, "return document.querySelector('.dtcc-list-buttons button, .dtcc-searchNumber input')")
    choices = page.find_elements("css selector", ".dtcc-list-buttons button")
    if choices:
        next(one for one in choices if one.text.strip() == value).click()
    else:
        page.execute_script(
            """const [select, input] = document.querySelectorAll(".dtcc-searchNumber select, .dtcc-searchNumber input");
            [select.value, input.value] = arguments; input.dispatchEvent(new Event("input"))""", *value
        )  # fmt: skip
    page.find_element("tag name", "h1").click()


def test_filters_choose_rows_and_what_the_charts_show(page):
    """By group from a list, by seconds with a comparison; the charts then have the same methods in the same order."""
    methods, runs = page.find_element("css selector", "table.methods"), page.find_elements("css selector", TABLES)[2]
    dots, curves, _ = page.execute_script(FIGURES)
    choose(page, methods, "Changes", "clients")
    becomes(["gperxan", "fedavg", "csac"], texts_of, page, methods, "Method")
    # fedavg is the baseline
    becomes(["gperxan", "csac"], page.execute_script, "return arguments[0].data[0].y", dots)
    choose(page, methods, "s/round", ("less", "60"))
    becomes(["fedavg", "csac"], texts_of, page, methods, "Method")
    becomes(["fedavg"], lambda: list(filter(None, page.execute_script(SHOWN, curves)))[:1])
    choose(page, runs, "target", "sketch")
    choose(page, runs, "seed", ("equal", "1"))
    becomes(["1"] * 3, texts_of, page, runs, "seed")
    assert set(texts_of(page, runs, "target")) == {"sketch"}
    assert page.get_log("browser") == []


def test_hover_a_cell_and_a_point_lead_to_their_run_isolate_and_choose(page):
    """A point says its method and value; a click in the legend leaves one method; the axis of the costs is chosen."""
    from selenium.webdriver import ActionChains, Keys
    from selenium.webdriver.support.ui import Select

    table = page.find_element("css selector", "table.methods")
    table.find_element("xpath", ".//tr[td[1]='feddg-ga']/td[3]/a").click()
    heading = "return document.querySelector('dialog[open] h2')?.textContent"
    closed = "return !document.querySelector('dialog[open]')"
    assert until(page, heading) == "feddg-ga → photo, seed 0"
    dialog = page.find_element("id", "run")
    titles = [one.text for one in dialog.find_elements("css selector", "h3, figcaption")]
    # Panels without content, such as the confusion matrix, are not there.
    assert titles == ["Learning curves", "Clients", "Messages of each client, whole run", "Run it again"]
    assert "--method feddg-ga --target photo --seed 0" in dialog.find_element("tag name", "pre").text
    dialog.find_element("link text", "sketch, seed 1").click()
    becomes("feddg-ga → sketch, seed 1", page.execute_script, heading)
    ActionChains(page).send_keys(Keys.ESCAPE).perform()
    until(page, closed)
    assert "#run" not in page.current_url
    dots, curves, costs = page.execute_script(FIGURES)
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", curves)
    point = curves.find_elements("css selector", ".scatterlayer .points path")[-1]
    ActionChains(page).move_to_element(point).perform()
    assert "round 3:" in until(page, "return arguments[0].querySelector('.hovertext')?.textContent", curves)
    ActionChains(page).click().perform()
    assert until(page, heading).startswith("csac → photo")
    ActionChains(page).send_keys(Keys.ESCAPE).perform()
    until(page, closed)
    curves.find_elements("css selector", ".legendtoggle")[0].click()
    becomes(["gperxan"], lambda: list(filter(None, page.execute_script(SHOWN, curves))))
    figure = costs.find_element("xpath", "..")
    assert Select(figure.find_element("name", "cost")).first_selected_option.text == "bytes"
    Select(figure.find_element("name", "cost")).select_by_visible_text("seconds")
    assert page.execute_script("return arguments[0].layout.xaxis.title.text", costs) == "minutes of one run"
    assert page.execute_script(OVERLAP, costs) == []
    said = [one.text for one in page.find_elements("css selector", ".said")]
    assert said[0] == "Missing: csac: sketch (every seed)."
    assert said[2] == "Not drawn, because a target or the cost is missing: csac."
    assert [one["text"] for one in page.execute_script("return arguments[0].layout.annotations", dots)] == ["missing"]


def luminance(colour):
    """Relative luminance (WCAG) of `rgb(r, g, b)`."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))
