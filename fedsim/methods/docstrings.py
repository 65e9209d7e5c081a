"""Reads our plain-text docstrings: paragraphs, formulas, the meaning of fields, and the layers of a part's file."""

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from functools import cache
from itertools import pairwise

from torch import nn

# A line that documents fields or settings: their names and a colon. Any other words before a colon are a sentence, and
# so is such a line in the middle of one.
FIELD = re.compile(r"(?!Source: )`?\w+`?(?:, `?\w+`?)*: ")


def blocks(text: str) -> list[tuple[str, str]]:
    """("text", paragraph on one line) and ("lines", block whose line breaks and indentation count), in order."""
    sections: list[tuple[str, str]] = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        lines = block.split("\n")
        if any(line.startswith(("    ", "- ", ">>> ")) for line in lines):
            sections.append(("lines", block))
            continue
        paragraph = ""
        for line in lines:
            if paragraph and FIELD.match(line) and (FIELD.match(paragraph) or paragraph[-1] in ".:?)"):
                sections.append(("text", paragraph))
                paragraph = line.strip()
            else:
                paragraph = f"{paragraph} {line.strip()}".strip()
        sections.append(("text", paragraph))
    return sections


def field_of(paragraph: str) -> tuple[list[str], str]:
    """(names, meaning) of a paragraph that documents fields; no names for any other paragraph."""
    if not FIELD.match(paragraph):
        return [], ""
    names, _, meaning = paragraph.partition(": ")
    return [name.strip("` ") for name in names.split(",")], meaning


def layers_of(kind: type) -> list[type]:
    """The layers that a part's file defines: they have the formulas of what the part puts into a network."""
    members = vars(sys.modules[kind.__module__]).values()
    return [
        value
        for value in members
        if isinstance(value, type)
        and issubclass(value, nn.Module)
        and value.__module__ == kind.__module__
        and not value.__name__.startswith("_")
    ]


def field_texts(kind: type) -> dict[str, str]:
    """What each field means: the text under it in the code, or its line in the docstring; empty: the text says it."""
    texts = {field.name: "" for field in dataclasses.fields(kind)}
    for paragraph in (body for form, body in blocks(inspect.getdoc(kind) or "") if form == "text"):
        names, meaning = field_of(paragraph)
        texts |= {name: meaning for name in names if name in texts}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            texts |= _written_below(base)
    return texts


@cache
def _written_below(kind: type) -> dict[str, str]:
    """{field: the text that follows it in the class's code}."""
    (written,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(written, ast.ClassDef)
    return {
        ast.unparse(line.target): inspect.cleandoc(str(after.value.value))
        for line, after in pairwise(written.body)
        if isinstance(line, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }
