"""Counts what makes a tree of fedsim hard to find one's way in: `python tests/house/count.py [TREE ...]`.

A room is a file of fedsim's root or a folder in it; clients/ and strategies/ are a room each. Imports inside functions
and for type checkers count, too. A flag is a name that a class of a part declares as a ClassVar.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import numpy as np
from scipy.sparse.csgraph import connected_components

PACKAGES = ("fedsim", "clients", "strategies")
FLAG, REFUSES = re.compile(r"^    (\w+): ClassVar\b", re.M), re.compile(r"^    def refuses\(", re.M)
Graph = Mapping[str, set[str]]  # {name: the names that it imports}


def graphs(tree: Path) -> tuple[Graph, Graph]:
    """What each module of a tree imports, and what each room."""
    sys.path.insert(0, str(tree))
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    modules = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    rooms: dict[str, set[str]] = {}
    for name, others in modules.items():
        own, *imported = (".".join(each.split(".")[: 1 + each.startswith("fedsim.")]) for each in (name, *others))
        rooms.setdefault(own, set()).update({*imported} - {own})
    return modules, rooms


def circles(graph: Graph) -> list[int]:
    """For each name the number of its circle; a name that is in none has a number of its own."""
    names = list(graph)
    return [*connected_components(np.array([[b in graph[a] for b in names] for a in names]), connection="strong")[1]]


def floors(graph: Graph) -> int:
    """The number of names on the longest way down; a circle is one floor."""
    home, below = dict(zip(graph, circles(graph))), {}
    for name, others in graph.items():
        below.setdefault(home[name], set()).update({home[other] for other in others} - {home[name]})
    depth: dict[int, int] = {}
    for number in TopologicalSorter(below).static_order():
        depth[number] = 1 + max((depth[other] for other in below[number]), default=0)
    return max(depth.values())


def counts(tree: Path) -> Iterator[tuple[str, int]]:
    """All counts of a tree, by what they count."""
    modules, rooms = graphs(tree)
    code = "".join(file.read_text() for name in PACKAGES for file in (tree / name).rglob("*.py"))
    yield from (("rooms", len(rooms)), ("pairs that import", sum(map(len, rooms.values()))), ("floors", floors(rooms)))
    sizes = np.bincount(circles(modules))
    yield from (
        ("circles of files", int((sizes > 1).sum())),
        ("files in the largest", int(sizes.max() * (sizes.max() > 1))),
    )
    yield from (("flags", len(set(FLAG.findall(code)))), ("methods refuses", len(REFUSES.findall(code))))
    yield from (("lines of code", code.count("\n")),)
    yield "lines of tests", sum(file.read_text().count("\n") for file in (tree / "tests").rglob("*.py"))


if __name__ == "__main__":
    trees = [Path(word).resolve() for word in sys.argv[1:]] or [Path(__file__).parents[2]]
    for rows in zip(*(counts(tree) for tree in trees)):
        print(f"{rows[0][0]:24}", *(f"{number:>8}" for _, number in rows))
