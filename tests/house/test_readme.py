"""The README's map of the house is the house."""

import re
from pathlib import Path

from fedsim.recipe import SLOTS

ROOT = Path(__file__).parents[2]


def test_every_slot_has_a_line_with_its_folder():
    lines = re.findall(r"^\| \w+ \| `(\w+)` \| [^|]+ \| `([\w/]+)/` \|$", (ROOT / "README.md").read_text(), re.M)
    assert [slot for slot, _ in lines] == list(SLOTS)
    for slot, folder in lines:
        files = [file for file in (ROOT / folder).glob("*.py") if file.name != "__init__.py"]
        assert files, f"{slot}: {folder} has no part"
