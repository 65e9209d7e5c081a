"""The README's table of slots agrees with the folders of the parts."""

import re
from pathlib import Path

from fedsim.recipe import SLOTS
from fedsim.registry import FOLDERS

ROOT = Path(__file__).parents[2]


def test_every_slot_has_a_line_with_its_folder():
    lines = re.findall(r"^\| \w+ \| `(\w+)` \| [^|]+ \| `([\w/]+)/` \|$", (ROOT / "README.md").read_text(), re.M)
    assert [slot for slot, _ in lines] == list(SLOTS)
    for slot, folder in lines:
        assert folder.replace("/", ".") == FOLDERS[slot], slot
