"""Functions have fewer than 50 lines and files fewer than 300, so that each can be read at once."""

import ast
from collections.abc import Iterator
from pathlib import Path

from count import parsed

ROOT = Path(__file__).parents[2]
FOLDERS = ("fedsim", "strategies", "clients", "tests", "benchmarks", "docs")


def too_long(file: Path) -> Iterator[str]:
    """The names of a file and of its functions that have too many lines."""
    text = file.read_text(encoding="utf-8")
    if text.count("\n") >= 300:
        yield file.name
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 49:
            yield f"{file.name}: {node.name}"


def test_functions_and_files_are_short():
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    assert [name for file in files for name in too_long(file)] == []


def test_a_long_function_is_seen(tmp_path):
    (tmp_path / "a.py").write_text("def short():\n" + "    pass\n" * 48 + "def long():\n" + "    pass\n" * 49)
    assert list(too_long(tmp_path / "a.py")) == ["a.py: long"]
