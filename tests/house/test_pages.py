"""The pages for maintainers name files and folders that exist, and every folder of the packages."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("docs/architecture.md", "CONTRIBUTING.md", "README.md")
PLACE = re.compile(r"(?:fedsim|strategies|clients|configs|tests|benchmarks|docs)/[\w/.-]*\w/?")


@pytest.mark.parametrize("page", PAGES)
def test_every_place_exists(page):
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    places = {place for code in re.findall(r"`([^`]+)`", text) for place in PLACE.findall(code)} - {"docs/_build"}
    assert places
    assert [place for place in places if not (ROOT / place).exists()] == []


def test_every_folder_is_in_the_layout():
    text = (ROOT / "docs/architecture.md").read_text()
    slots = re.findall(r"`((?:strategies|clients|fedsim)/[\w/]+/)`", (ROOT / "README.md").read_text())
    folders = {
        f"{file.parent.relative_to(ROOT)}/"
        for name in ("fedsim", "strategies", "clients")
        for file in (ROOT / name).rglob("*.py")
    }
    missing = [folder for folder in folders - set(slots) if f"`{folder}`" not in text and folder.count("/") <= 2]
    assert missing == []
