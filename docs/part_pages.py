"""The pages of the parts: by slot, every part with what it computes, its formulas and the meaning of its settings."""

import dataclasses
import inspect
import re
from pathlib import Path

from docstrings import to_markdown

from fedsim.methods.docstrings import field_texts, layers_of
from fedsim.methods.part_settings import toml_value
from fedsim.methods.recipe import SLOTS
from fedsim.methods.registry import one_line, parts_by_slot
from fedsim.parts.part import part_name
from fedsim.settings.effect import Only, conditions, in_words, marks
from fedsim.settings.tuned import Tuned


def write_part_pages(folder: Path) -> None:
    """A page for each slot, and an index that links every part to its place there."""
    lines = ["# Parts", "", "A method is a row of parts, and `--set` exchanges or adds any part of this page. "
             "`fedsim methods --parts` prints the same list. [Which objectives, updates and steps combine]"
             "(pairs.md).", ""]  # fmt: skip
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
    entries = "\n".join([*SLOTS, "pairs"])
    (folder / "index.md").write_text("\n".join(lines) + f"\n```{{toctree}}\n:hidden:\n\n{entries}\n```\n")


def write_code_pages(folder: Path) -> None:
    """A page with the source of every module that has a part."""
    for module in sorted({kind.__module__ for kinds in parts_by_slot().values() for kind in kinds.values()}):
        file = f"{module.replace('.', '/')}.py"
        code = f"```{{literalinclude}} ../../{file}\n:language: python\n```\n"
        (folder / f"{module}.md").write_text(f"---\norphan: true\n---\n\n# {file}\n\n{code}")


def code_link(kind: type, words: str = "") -> str:
    """The name of a part's file, or other words, with a link to its page."""
    file = f"`{kind.__module__.replace('.', '/')}.py`"
    return f"[{words or file}](../code/{kind.__module__}.md)"


def part_section(kind: type, part: object = None) -> list[str]:
    """A part's heading, its docstring, those of its layers, and its settings: the values of `part`, or the defaults."""
    name = part_name(kind)
    lines = [f"## {name}", "", code_link(kind), ""]
    texts, needs, drawn = field_texts(kind), conditions(kind), marks(kind, Tuned)
    lines += [to_markdown(inspect.getdoc(kind) or "", without=texts), ""]
    for layer in layers_of(kind):
        lines += [f"**`{layer.__name__}`**", "", to_markdown(inspect.getdoc(layer) or ""), ""]
    fields = dataclasses.fields(kind)
    if fields:
        shown = {field.name: field.default if part is None else getattr(part, field.name) for field in fields}
        lines += [f"`--set method.{name}.SETTING=VALUE` changes a setting:", ""]
        lines += [f"| setting | {'default' if part is None else 'value in this row'} | meaning |", "|---|---|---|"]
        lines += [
            f"| `{key}` | `{toml_value(value)}` | "
            f"{in_cell(explained(texts[key], needs.get(key, ()), drawn.get(key, ())))} |"
            for key, value in shown.items()
        ]
        lines.append("")
    return lines


def explained(text: str, needs: tuple[Only, ...], drawn: tuple[Tuned, ...]) -> str:
    """What a setting means, where it has an effect if not everywhere, and from what a search draws it."""
    words = [f"it has an effect only with {in_words(needs)}"] if needs else []
    words += [f"a search draws it from {one.words()}" for one in drawn]
    return "; ".join(filter(None, (text.rstrip("."), *words))) if words else text


def in_cell(text: str) -> str:
    """A text on one line, as Markdown for a cell of a table."""
    return re.sub(r"(?<!\\)\|", r"\|", to_markdown(" ".join(text.split())))
