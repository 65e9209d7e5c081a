"""The pages agree with the tree: its folders, slots and counts, and the distribution's name, which no other has."""

import re
import tomllib
from pathlib import Path

import pytest

import fedsim
from fedsim.analysis import compare
from fedsim.data import BENCHMARKS
from fedsim.methods.listing import step_costs
from fedsim.methods.recipe import SLOTS
from fedsim.methods.registry import FOLDERS
from fedsim.methods.table import METHODS
from fedsim.records import read_runs
from fedsim.records.environment import environment

ROOT = Path(__file__).parents[2]
PACKAGES = ("fedsim", "strategies", "clients")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
SLOT_TABLE = (ROOT / "docs/architecture.md").read_text().split("## The slots")[1].split("\n## ")[0]
PLACE = re.compile(r"(?:fedsim|strategies|clients|configs|tests|benchmarks|docs)/[\w/.-]*\w/?")


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md", "README.md"])
def test_every_place_exists(page):
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    places = {place for code in re.findall(r"`([^`]+)`", text) for place in PLACE.findall(code)} - {"docs/_build"}
    assert places
    assert [place for place in places if not (ROOT / place).exists()] == []


def test_every_function_is_where_the_layout_says():
    found = re.findall(r"`(\w+)` in `([\w/]+\.py)`", (ROOT / "docs/architecture.md").read_text())
    assert len(found) >= 6
    assert [
        (name, file)
        for name, file in found
        if not re.search(rf"^ *(def|class) {name}\b", (ROOT / file).read_text(), re.M)
    ] == []


def test_every_folder_is_in_the_layout():
    text = (ROOT / "docs/architecture.md").read_text()
    slots = set(re.findall(r"`((?:strategies|clients|fedsim)/[\w/]+/)`", text))
    folders = {f"{file.parent.relative_to(ROOT)}/" for name in PACKAGES for file in (ROOT / name).rglob("*.py")}
    assert [each for each in folders - slots if f"`{each}`" not in text and each.count("/") <= 2] == []


def test_the_counts_are_those_of_the_tables():
    assert re.search(r"(\d+) methods, (\d+) data sets", README).groups() == (str(len(METHODS)), str(len(BENCHMARKS)))


@pytest.mark.parametrize("study", sorted(path.stem for path in (ROOT / "docs/results").glob("*.zip")))
def test_the_first_tables_are_what_compare_prints_of_their_records(study):
    cells = compare(read_runs(ROOT / "docs/results" / f"{study}.zip"), published=False).cells
    page = (ROOT / f"docs/tables/{study.split('-')[0]}.md").read_text()
    table = re.sub(r" ± [\d.]+|\*\*", "", page)
    for label, row in cells.groupby("label", sort=False):
        shown = " | ".join(f"{100 * value:.1f}" for value in row["mean"])
        assert f" | {shown} " in table, label


def test_the_worst_hospital_of_each_row_is_what_compare_prints():
    methods = compare(read_runs(ROOT / "docs/results/hospitals.zip"), baseline="fedavg").methods
    table, _ = (ROOT / "docs/tables/hospitals.md").read_text().split("## AUROC")
    rows = re.findall(r"^\| ([\w-]+)(?: §)? (?:\| [^|]+){5}\| ([\d.]+) \|", table, re.M)
    printed = dict(rows)
    assert len(printed) == 40
    for method in methods.to_dict("records"):
        assert f"{100 * method['worst']:.1f}" == printed[method["label"]]


def test_the_first_screen_is_short():
    lines = README.splitlines()
    assert len(lines) <= 90
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize(("page", "most"), [("fedsim/deploy/SECURITY.md", 1000), ("docs/results.md", 1300)])
def test_a_page_for_a_first_reader_stays_short(page, most):
    assert len(re.findall(r"[^\s|]*\w[^\s|]*", (ROOT / page).read_text())) <= most


def test_the_site_begins_like_the_readme_and_speaks_of_itself():
    first = (ROOT / "docs/index.md").read_text()
    (end,) = re.findall(r'^```\{include\} \.\./README\.md\n(?::.*\n)*:end-before: "(.+)"$', first, re.M)
    assert README.count(f"\n{end}\n") == 1
    assert [page.name for page in (ROOT / "docs").glob("*.md") if "after `make docs`" in page.read_text()] == []


def test_every_preset_has_a_line_with_its_files():
    files_of: dict[str, set[str]] = {}
    for file in (ROOT / "configs").glob("*.toml"):
        for preset in tomllib.loads(file.read_text()).get("presets", {}):
            files_of.setdefault(preset, set()).add(file.stem)
    first = (ROOT / "docs/presets.md").read_text().split("\n## ")[0]
    lines = re.findall(r"^\| (?:\[)?`([\w-]+)`(?:\]\([^)]+\))? \| ([^|]+) \|", first, re.M)
    assert {preset: set(re.findall(r"`([\w-]+)`", files)) for preset, files in lines} == files_of


def test_every_slot_has_a_line_with_its_folder():
    lines = re.findall(r"^\| \w+ \| `(\w+)` \| [^|]+ \| `([\w/]+)/` \|$", SLOT_TABLE, re.M)
    assert [slot for slot, _ in lines] == list(SLOTS)
    assert {slot: folder.replace("/", ".") for slot, folder in lines} == FOLDERS


def test_the_project_is_called_as_the_program_says():
    assert PROJECT["name"] == fedsim.DISTRIBUTION != "fedsim"
    assert PROJECT["version"] == fedsim.__version__ == environment()["packages"]["fedsim"]
    assert PROJECT["scripts"] == {"fedsim": "fedsim.commands.start:main"}


def test_every_extra_that_a_message_names_is_there():
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    call = r"\b(?:extra|optional)\(.*?['\"](\w+)['\"]\)"
    named = {name for file in files for name in re.findall(call, file.read_text())}
    assert {"ray", "tensorboard"} <= named <= set(PROJECT["optional-dependencies"])
    assert fedsim.extra("ray") == "pip install 'feddg-sim[ray]'"


def test_start_names_every_extra():
    extras, text = PROJECT["optional-dependencies"], (ROOT / "docs/start.md").read_text()
    parts = re.search(r"\[(.*)\]", extras["all"][0])[1].split(",")
    named = re.search(r"There are `ray`.*?\n\n", text, re.DOTALL)[0]
    assert sorted(parts) == sorted(extras.keys() - {"all", "docs", "dev"})
    assert set(parts) <= set(re.findall(r"`([\w-]+)`", named))
    installed = "feddg-sim[all,docs]" in extras["dev"]
    assert installed == ("`all` stands for all of them, and `make` installs it." in named)


def test_speed_names_the_methods_without_a_cost():
    named = re.search(r"for each method but (.*?),\s+where", (ROOT / "docs/speed.md").read_text(), re.DOTALL)[1]
    assert set(re.findall(r"`([\w-]+)`", named)) == METHODS.keys() - step_costs()[0].keys()


def test_nobody_is_told_to_install_the_other_project():
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs/tables").glob("*.md"),
        *(ROOT / "fedsim").rglob("*.md"),
    ]
    pages += [*(ROOT / "fedsim").rglob("*.py"), *(ROOT / "configs").rglob("*.toml")]
    wrong = re.compile(r".*install ['\"]?fedsim\b(?!/).*|.*(?:fedsim\[\w+\]|fedsim-\*?\d*\.whl|fedsim-\*).*")
    assert [f"{page.name}: {line}" for page in pages for line in wrong.findall(page.read_text())] == []
