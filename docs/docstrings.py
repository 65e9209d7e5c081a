"""Turns our plain-text docstrings into Markdown and reStructuredText."""

import re
import textwrap
from collections.abc import Collection

from typeset import typeset

from fedsim.methods.docstrings import blocks, field_of


def to_markdown(text: str, without: Collection[str] = ()) -> str:
    """The docstring as Markdown, with its formulas typeset.

    without: fields whose paragraphs are left out, because they are shown elsewhere
    """
    found = []
    for kind, body in blocks(text):
        if kind == "lines" and body.lstrip().startswith(">>>"):
            found.append(f"```python\n{textwrap.dedent(body)}\n```")
        elif kind == "lines":
            lines = [
                f"{'&emsp;' * ((len(line) - len(line.lstrip())) // 4 - 1)}{inline(line.strip())}"
                for line in body.split("\n")
            ]
            shown = "\\\n".join(lines)
            found.append(f"```{{container}} formula\n{shown}\n```" if "{math}" in shown else f"```text\n{body}\n```")
        elif not set(field_of(body)[0]) & set(without):
            found.append(inline(body))
    return "\n\n".join(found)


def inline(text: str) -> str:
    """Text with formulas typeset; what is in `backticks` stays code."""
    pieces = re.split(r"(`[^`]+`)", text)
    return "".join(piece if piece[:1] == "`" else typeset(piece, escaped) for piece in pieces)


def escaped(text: str) -> str:
    """Text that Markdown shows as it is written."""
    return re.sub(r"([\\`*_{}\[\]<>#|~$])", r"\\\1", text)


def to_rest(lines: list[str]) -> list[str]:
    """The docstring's lines as reStructuredText."""
    result: list[str] = []
    for kind, body in blocks("\n".join(lines)):
        if kind == "lines":
            result += ["::", "", *[f"   {line}" for line in body.split("\n")], ""]
        else:
            pieces = re.split(r"`([^`]+)`", body)
            code = [
                f"``{piece}``" if place % 2 else re.sub(r"([\\`*_|])", r"\\\1", piece)
                for place, piece in enumerate(pieces)
            ]
            result += ["".join(code), ""]
    return result
