"""The house does not grow again without someone noticing: functions, files, rooms, and which room imports which."""

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]
FOLDERS = ("fedsim", "strategies", "clients", "tests", "benchmarks", "docs")
ROOMS, PAIRS, FLOORS = 21, 122, 14  # whoever needs more says here what for


def too_long(file: Path) -> Iterator[str]:
    """The names of a file and of its functions that have too many lines: 300, and 50."""
    text = file.read_text(encoding="utf-8")
    if text.count("\n") >= 300:
        yield file.name
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 49:
            yield f"{file.name}: {node.name}"


def test_functions_and_files_are_short(tmp_path):
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    assert [name for file in files for name in too_long(file)] == []
    (tmp_path / "a.py").write_text("def short():\n" + "    pass\n" * 48 + "def long():\n" + "    pass\n" * 49)
    assert list(too_long(tmp_path / "a.py")) == ["a.py: long"]


def test_rooms_do_not_grow_nothing_imports_in_a_circle_and_no_module_hides_one_of_python():
    """A room is a file of fedsim's root or a folder in it; clients/ and strategies/ are a room each. Imports inside
    functions and for type checkers count too."""
    graph = grimp.build_graph("fedsim", "clients", "strategies", cache_dir=None)
    modules = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    rooms: dict[str, set[str]] = {}
    for name, others in modules.items():
        own, *imported = (".".join(each.split(".")[: 1 + each.startswith("fedsim.")]) for each in (name, *others))
        rooms.setdefault(own, set()).update({*imported} - {own})
    assert len(rooms) <= ROOMS, sorted(rooms)
    assert sum(map(len, rooms.values())) <= PAIRS
    depth: dict[str, int] = {}
    for name in TopologicalSorter(rooms).static_order():  # a CycleError names the circle
        depth[name] = 1 + max((depth[other] for other in rooms[name]), default=0)
    assert max(depth.values()) <= FLOORS
    TopologicalSorter(modules).prepare()
    assert {name.split(".")[0] for name in modules}.isdisjoint(sys.stdlib_module_names)
