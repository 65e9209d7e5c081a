"""Sentences of public docstrings have at most 30 words, so that a reader in a second language follows them at once."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from count import parsed

ROOT = Path(__file__).parents[2]
MOST = 30
ITEM = re.compile(r"[-*] |[\w`*./(][\w`*.,/() -]{0,60}: ")  # an item of a list, or a field and its meaning
END = re.compile(r"(?<=[.!?;:])\)?\s+(?=[\w`(\"'])")


def sentences(docstring: str) -> Iterator[str]:
    """The sentences of a docstring without its formulas, which are indented, and without the texts of its tables."""
    for paragraph in re.split(r"\n\s*\n", docstring):
        unit: list[str] = []
        for line in paragraph.splitlines():
            if line.startswith("    ") or line.lstrip().startswith(("|", ">")):
                continue
            if ITEM.match(line) and unit:
                yield from END.split(" ".join(unit))
                unit = []
            unit.append(line.strip())
        yield from END.split(" ".join(unit)) if unit else ()


def public(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(name, docstring) of a module, its public classes and functions, and their public methods."""
    nodes = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef))]
    for node in nodes:
        name = getattr(node, "name", "the module")
        if not name.startswith("_") and (text := ast.get_docstring(node)):
            yield name, text


def test_sentences_are_short():
    long = [
        f"{file.relative_to(ROOT)}: {name}: {sentence}"
        for package in ("fedsim", "strategies", "clients")
        for file in sorted((ROOT / package).rglob("*.py"))
        for name, text in public(parsed(file))
        for sentence in sentences(text)
        if len(re.findall(r"\b[A-Za-z][\w'-]*", sentence)) > MOST
    ]
    assert long == []


def test_a_long_sentence_is_seen():
    words = " ".join(["word"] * 31)
    found = [len(each.split()) for each in sentences(f"A title.\n\n{words}.\n\n    {words}\n\n- one\n- {words}")]
    assert found == [2, 31, 2, 32]
