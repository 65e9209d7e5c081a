"""Turns our plain-text docstrings into Markdown and reStructuredText."""

import re
from collections.abc import Collection

from fedsim.methods.docstrings import blocks, field_of


def to_markdown(text: str, without: Collection[str] = ()) -> str:
    """The docstring as Markdown; what is in `backticks` stays code, all else is shown as it is written.

    without: fields whose paragraphs are left out, because they are shown elsewhere
    """
    special, found = "\\`*_{}[]<>#|~$", []
    for kind, body in blocks(text):
        if kind == "lines":
            found.append(f"```text\n{body}\n```")
        elif not set(field_of(body)[0]) & set(without):
            found.append(_escaped(body, special))
    return "\n\n".join(found)


def to_rest(lines: list[str]) -> list[str]:
    """The docstring's lines as reStructuredText."""
    result: list[str] = []
    for kind, body in blocks("\n".join(lines)):
        if kind == "lines":
            result += ["::", "", *[f"   {line}" for line in body.split("\n")], ""]
        else:
            result += [_escaped(body, "\\`*_|", code="``"), ""]
    return result


def _escaped(text: str, special: str, code: str = "`") -> str:
    pieces = re.split(r"`([^`]+)`", text)
    parts = []
    for index, piece in enumerate(pieces):
        if index % 2:
            parts.append(f"{code}{piece}{code}")
        else:
            parts.append("".join(f"\\{letter}" if letter in special else letter for letter in piece))
    return "".join(parts)
