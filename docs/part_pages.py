"""The pages of the parts: by slot, every part with what it computes, its formulas and the meaning of its settings."""

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from docstrings import blocks, field_of, to_markdown
from torch import nn

from fedsim.methods.part_settings import toml_value
from fedsim.methods.recipe import SLOTS
from fedsim.methods.registry import one_line, parts_by_slot
from fedsim.parts.part import part_name


def write_part_pages(folder: Path) -> None:
    """A page for each slot, and an index that links every part to its place there."""
    lines = ["# Parts", "", "A method is a row of parts, and `--set` exchanges or adds any part of this page. "
             "`fedsim methods --parts` prints the same list.", ""]  # fmt: skip
    shown: dict[type, str] = {}
    for slot, kinds in parts_by_slot().items():
        page = [f"# {slot}", "", to_markdown(inspect.getdoc(SLOTS[slot]) or ""), ""]
        lines += [f"## {slot}", "", "| part | what it does |", "|---|---|"]
        for name, kind in sorted(kinds.items()):
            if kind not in shown:  # a part in two slots has one place
                shown[kind] = slot
                page += part_section(kind)
            lines.append(f"| [{name}]({shown[kind]}.md#{name}) | {in_cell(one_line(kind))} |")
        lines.append("")
        (folder / f"{slot}.md").write_text("\n".join(page))
    entries = "\n".join(SLOTS)
    (folder / "index.md").write_text("\n".join(lines) + f"\n```{{toctree}}\n:hidden:\n\n{entries}\n```\n")


def part_section(kind: type, part: object = None, heading: str = "") -> list[str]:
    """A part's heading, its docstring, those of its layers, and its settings: the values of `part`, or the defaults."""
    name = part_name(kind)
    lines = [f"## {heading or name}", "", f"`{kind.__module__.replace('.', '/')}.py`", ""]
    texts = field_texts(kind)
    lines += [to_markdown(inspect.getdoc(kind) or "", without=texts), ""]
    for layer in layers_of(kind):
        lines += [f"**`{layer.__name__}`**", "", to_markdown(inspect.getdoc(layer) or ""), ""]
    fields = dataclasses.fields(kind)
    if fields:
        shown = {field.name: field.default if part is None else getattr(part, field.name) for field in fields}
        lines += [f"| setting | {'default' if part is None else 'value in this row'} | meaning |", "|---|---|---|"]
        lines += [
            f"| `method.{name}.{key}` | `{toml_value(value)}` | {in_cell(texts[key])} |" for key, value in shown.items()
        ]
        lines.append("")
    return lines


def layers_of(kind: type) -> list[type]:
    """The layers that a part's file defines: they have the formulas of what the part puts into a network."""
    found = vars(sys.modules[kind.__module__]).values()
    return [
        value
        for value in found
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
            texts |= dict(_written_below(base))
    return texts


def _written_below(kind: type) -> Iterator[tuple[str, str]]:
    """(field, text) of the strings that follow the fields in the class's code."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body
    for line, after in pairwise(body):
        if isinstance(line, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            yield line.target.id, inspect.cleandoc(after.value.value)


def in_cell(text: str) -> str:
    """A text on one line, as Markdown for a cell of a table."""
    return re.sub(r"(?<!\\)\|", r"\|", to_markdown(" ".join(text.split())))
