"""Names of modules; import-linter holds which module imports which (pyproject.toml, `make lint`)."""

import sys
from pathlib import Path

from count import modules


def test_no_module_hides_one_of_python():
    assert {name.split(".")[0] for name in modules(Path(__file__).parents[2])}.isdisjoint(sys.stdlib_module_names)
