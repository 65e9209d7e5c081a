"""The report in a real browser: it sorts, filters, hovers, isolates, leads to runs, loads nothing, fits and prints."""

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
CLICK_AND_READ = """
const [head, column, done] = arguments, before = head.ariaSort;
head.querySelector(".dt-column-title").click();
(function look() {
  if (head.ariaSort === before) return setTimeout(look, 10);
  setTimeout(() => { // the rows follow the head
    const cells = [...head.closest("table").tBodies[0].rows].map(row => row.cells[column]);
    done([head.ariaSort, cells.map(cell => cell.dataset.order ?? cell.textContent.trim())]);
  }, 50);
})();
"""
FIGURES = "return [...document.querySelectorAll('.charts .plot')]"
SHOWN = "return arguments[0].data.filter(trace => trace.visible !== 'legendonly').map(trace => trace.name)"
IN_THE_BROWSERS_ORDER = "return arguments[0].toSorted((a, b) => a.localeCompare(b))"
OVERFLOW = """
const wide = [...document.querySelectorAll("body *")].filter(one => {
  for (let box = one.parentElement; box; box = box.parentElement)
    if (getComputedStyle(box).overflowX === "auto") return false;
  const inside = one.parentElement.closest("svg"); // which cuts what does not fit
  return !inside && one.getBoundingClientRect().right > innerWidth + 1;
});
return [document.documentElement.scrollWidth - innerWidth, wide.map(one => one.tagName)];
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


def test_nothing_is_fetched_and_nothing_complained_of(page, report):
    """The only request is for the page itself; its charts are drawn; the console is empty."""
    plots = page.execute_script(FIGURES)
    assert len(plots) == 3
    assert all(plot.find_elements("css selector", ".main-svg") for plot in plots)
    time.sleep(0.3)
    assert requests(page) == [report.as_uri()]
    assert page.get_log("browser") == []


def test_filters_choose_rows_and_what_the_charts_show(page):
    """By group from a list, by seconds with a comparison; the charts then have the same methods in the same order."""
    table = page.find_element("css selector", "table.methods")
    dots, curves, _ = page.execute_script(FIGURES)
    _, head = column_of(page, table, "Changes")
    head.find_element("css selector", ".dtcc-button").click()
    until(page, "return document.querySelector('.dtcc-list-buttons button')")
    choices = page.find_elements("css selector", ".dtcc-list-buttons button")
    next(one for one in choices if one.text.strip() == "clients").click()
    becomes(["gperxan", "fedavg", "csac"], texts_of, page, table, "Method")
    # fedavg is the baseline
    becomes(["gperxan", "csac"], page.execute_script, "return arguments[0].data[0].y", dots)
    page.find_element("tag name", "h1").click()
    _, head = column_of(page, table, "s/round")
    head.find_element("css selector", ".dtcc-button").click()
    until(page, "return document.querySelector('.dtcc-searchNumber')")
    page.execute_script(
        """const [select, input] = document.querySelectorAll(".dtcc-searchNumber select, .dtcc-searchNumber input");
        select.value = "less"; input.value = "60"; input.dispatchEvent(new Event("input"))"""
    )
    becomes(["fedavg", "csac"], texts_of, page, table, "Method")
    becomes(["fedavg"], lambda: list(filter(None, page.execute_script(SHOWN, curves)))[:1])
    assert page.get_log("browser") == []


def test_runs_are_filtered_by_target_and_seed(page):
    table = page.find_elements("css selector", "table.sortable")[2]
    for name, value in (("target", "sketch"), ("seed", "1")):
        _, head = column_of(page, table, name)
        head.find_element("css selector", ".dtcc-button").click()
        if name == "target":
            choices = page.find_elements("css selector", ".dtcc-list-buttons button")
            next(one for one in choices if one.text.strip() == value).click()
        else:
            until(page, "return document.querySelector('.dtcc-searchNumber input')")
            page.find_element("css selector", ".dtcc-searchNumber input").send_keys(value)
        page.find_element("tag name", "h1").click()
    becomes(["1"] * 3, texts_of, page, table, "seed")
    assert set(texts_of(page, table, "target")) == {"sketch"}


def test_hover_isolate_and_choose(page):
    """A point says its method and value; a click in the legend leaves one method; the axis of the costs is chosen."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.support.ui import Select

    dots, curves, costs = page.execute_script(FIGURES)
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", curves)
    point = curves.find_elements("css selector", ".scatterlayer .points path")[-1]
    ActionChains(page).move_to_element(point).perform()
    assert "round 3:" in until(page, "return arguments[0].querySelector('.hovertext')?.textContent", curves)
    curves.find_elements("css selector", ".legendtoggle")[0].click()
    becomes(["gperxan"], lambda: list(filter(None, page.execute_script(SHOWN, curves))))
    figure = costs.find_element("xpath", "..")
    assert Select(figure.find_element("name", "cost")).first_selected_option.text == "bytes"
    Select(figure.find_element("name", "cost")).select_by_visible_text("seconds")
    assert page.execute_script("return arguments[0].layout.xaxis.title.text", costs) == "minutes of one run"
    said = [one.text for one in page.find_elements("css selector", ".said")]
    assert said[0] == "Missing: csac: sketch (every seed)."
    assert said[2] == "Not drawn, because a target or the cost is missing: csac."
    assert [one["text"] for one in page.execute_script("return arguments[0].layout.annotations", dots)] == ["missing"]


def test_a_cell_and_a_point_lead_to_their_run(page):
    from selenium.webdriver import ActionChains, Keys

    table = page.find_element("css selector", "table.methods")
    table.find_element("xpath", ".//tr[td[1]='feddg-ga']/td[3]/a").click()
    heading = "return document.querySelector('dialog[open] h2')?.textContent"
    assert until(page, heading) == "feddg-ga → photo, seed 0"
    dialog = page.find_element("id", "run")
    titles = [one.text for one in dialog.find_elements("css selector", "h3, figcaption")]
    # Panels without content, such as the confusion matrix, are not there.
    assert titles == ["Learning curves", "Clients", "Messages of each client, whole run", "Run it again"]
    assert "--method feddg-ga --target photo --seed 0" in dialog.find_element("tag name", "pre").text
    dialog.find_element("link text", "sketch, seed 1").click()
    becomes("feddg-ga → sketch, seed 1", page.execute_script, heading)
    ActionChains(page).send_keys(Keys.ESCAPE).perform()
    until(page, "return !document.querySelector('dialog[open]')")
    assert "#run" not in page.current_url
    curves = page.execute_script(FIGURES)[1]
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", curves)
    ActionChains(page).move_to_element(curves.find_elements("css selector", ".points path")[-1]).click().perform()
    assert until(page, heading).startswith("csac → photo")


def test_on_paper_the_page_is_light_and_the_charts_fit(page):
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    plots = page.execute_script(FIGURES)
    widths = "return arguments[0].map(plot => plot.querySelector('svg').clientWidth)"
    before = page.execute_script(widths, plots)
    page.execute_script("dispatchEvent(new Event('beforeprint'))")
    becomes([680] * 3, page.execute_script, widths, plots)
    assert luminance(page.execute_script(COLOURS)[1]) > 0.9
    page.execute_script("dispatchEvent(new Event('afterprint'))")
    becomes(before, page.execute_script, widths, plots)


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
            orders = dict(page.execute_async_script(CLICK_AND_READ, head, column) for _ in range(2))
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
    until(
        page,
        f"{OVERFLOW.replace('return [document', 'const [over, tags] = [document')} return over <= 0 && !tags.length",
    )
    text, back = map(luminance, page.execute_script(COLOURS))
    assert (max(text, back) + 0.05) / (min(text, back) + 0.05) >= 7  # WCAG
    assert (back < 0.1) == (scheme == "dark")


def luminance(colour):
    """Relative luminance (WCAG) of `rgb(r, g, b)`."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))
