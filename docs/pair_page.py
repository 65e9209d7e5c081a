"""The page of pairs: every objective and every whole step with every update, companion and whole step."""

import re

from fedsim.common.errors import UserError
from fedsim.methods.assembly import find_recipe
from fedsim.methods.recipe import Recipe
from fedsim.methods.table import METHODS
from fedsim.parts.part import part_name

HEAD = """# Objectives, updates and steps

An objective says what the loss of a batch is, an update how the loss moves the weights, and a companion what is trained
next to it. The table shows every pair of them, and every whole step, as the combination of two rows (`fedsim run digits
--method jigen+fedsam`). A number stands for the reason below the table for which a pair is refused. This page is made
from the code.

"""


def rows_with(*slots: str) -> dict[str, str]:
    """{part: the first row that has it} for the parts of these slots that differ from FedAvg's."""
    found: dict[str, str] = {}
    for row, recipe in METHODS.items():
        for slot in slots:
            value = getattr(recipe, slot)
            if value != getattr(Recipe(), slot):
                found.setdefault(part_name(value[0] if isinstance(value, tuple) else value), row)
    return found


def pair_page() -> str:
    """The page as Markdown."""
    across = rows_with("update", "companions", "step")
    down = rows_with("objective", "step")
    heads = [f"{part.replace('_', ' ')}<br>{row}" for part, row in across.items()]
    lines = [
        f"| | {' | '.join(heads)} |",
        "|---" * (len(across) + 1) + "|",
    ]
    reasons: list[str] = []
    for part, row in down.items():
        cells = [cell(row, other, reasons) for other in across.values()]
        lines.append(f"| `{part}`<br>{row} | {' | '.join(cells)} |")
    listed = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return HEAD + "\n".join([*lines, "", *listed, ""])


def cell(row: str, other: str, reasons: list[str]) -> str:
    """`runs`, or the number of the reason, which is added to the reasons where it is new."""
    if row == other:
        return ""
    try:
        find_recipe(f"{row}+{other}")
    except UserError as error:
        reason = without_names(str(error))
        if reason not in reasons:
            reasons.append(reason)
        return str(reasons.index(reason) + 1)
    return "runs"


def without_names(sentence: str) -> str:
    """A refusal that fits all pairs which are refused for the same reason."""
    if found := re.search(r": (\w+) is \S+ in one and \S+ in the other", sentence):
        return f"Both have a part of their own in the slot `{found[1]}`."
    if found := re.search(r"assumes that (.+), which does not hold with", sentence):
        return f"One of the two assumes that {found[1]}, which does not hold with the other."
    return sentence
