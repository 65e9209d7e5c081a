"""Turns our plain-text docstrings into paragraphs: wrapped text flows, formulas and lists keep their lines."""

import inspect
import re
from collections.abc import Collection

# A line that documents fields or settings: their names and a colon. Any other words before a colon are a sentence.
FIELD = re.compile(r"`?\w+`?(?:, `?\w+`?)*: ")


def blocks(text: str) -> list[tuple[str, str]]:
    """("text", paragraph on one line) and ("lines", block whose line breaks and indentation count), in order."""
    found: list[tuple[str, str]] = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        lines = block.split("\n")
        if any(line.startswith(("    ", "- ")) for line in lines):
            found.append(("lines", block))
            continue
        paragraph = ""
        for line in lines:
            if paragraph and FIELD.match(line):
                found.append(("text", paragraph))
                paragraph = line.strip()
            else:
                paragraph = f"{paragraph} {line.strip()}".strip()
        found.append(("text", paragraph))
    return found


def field_of(paragraph: str) -> tuple[list[str], str]:
    """(names, meaning) of a paragraph that documents fields; no names for any other paragraph."""
    if not FIELD.match(paragraph):
        return [], ""
    names, _, meaning = paragraph.partition(": ")
    return [name.strip("` ") for name in names.split(",")], meaning


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
