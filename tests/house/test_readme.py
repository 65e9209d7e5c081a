"""The README's table of slots agrees with the folders of the parts."""

import re
from pathlib import Path

import pytest

from fedsim.data import BENCHMARKS
from fedsim.methods.recipe import SLOTS
from fedsim.methods.registry import FOLDERS
from fedsim.methods.table import METHODS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_counts_are_those_of_the_tables(page):
    text = (ROOT / page).read_text()
    assert re.search(r"(\d+) methods, (\d+) data sets", text).groups() == (str(len(METHODS)), str(len(BENCHMARKS)))


def test_the_pages_begin_alike():
    """What the program is, is said in the same words on both first pages."""
    first, second = ((ROOT / page).read_text().split("\n\n")[1] for page in ("README.md", "docs/index.md"))
    assert first.replace("docs/", "") == second


def test_every_slot_has_a_line_with_its_folder():
    lines = re.findall(r"^\| \w+ \| `(\w+)` \| [^|]+ \| `([\w/]+)/` \|$", (ROOT / "README.md").read_text(), re.M)
    assert [slot for slot, _ in lines] == list(SLOTS)
    for slot, folder in lines:
        assert folder.replace("/", ".") == FOLDERS[slot], slot
