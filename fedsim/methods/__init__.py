"""What a method is: the table of all methods (`fedsim.methods.table`, start there), and what is made of its rows."""

import importlib
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedsim.methods.recipe import Recipe


def __getattr__(name: str) -> dict[str, "Recipe"]:
    if name != "METHODS":
        raise AttributeError(f"module 'fedsim.methods' has no attribute {name!r}")
    warnings.warn(
        "fedsim.methods.METHODS is fedsim.METHODS now; the old name goes with the next version", FutureWarning, 2
    )
    return importlib.import_module("fedsim.methods.table").METHODS
