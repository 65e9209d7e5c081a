"""Counts what makes a tree of fedsim hard to find one's way in: `python tests/house/count.py [TREE ...]`.

Several trees are printed side by side. Nothing of a tree is imported, so any version can be counted.

A room is a file of fedsim's root or a folder beside it; clients/ and strategies/ are a room each. An import counts
wherever it stands: inside functions and under TYPE_CHECKING, too.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGES = ("fedsim", "clients", "strategies")
Graph = Mapping[str, set[str]]  # {name: the names that it imports}


@cache
def parsed(file: Path) -> ast.Module:
    """The syntax of a file, which several tests read."""
    return ast.parse(file.read_text(encoding="utf-8"))


def modules(tree: Path) -> dict[str, Path]:
    """Every module of the three packages, by name."""
    found = {}
    for package in PACKAGES:
        for file in (tree / package).rglob("*.py"):
            parts = file.relative_to(tree).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported(file: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """The names of all that a file imports: modules of the tree by their full name, others by their package's name."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in full]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name if name in known else name.partition(".")[0] for name in names)


def module_graph(tree: Path) -> Graph:
    """Which module of the tree imports which."""
    known = modules(tree)
    return {
        name: {other for other in imported(file, known) if other in known and other != name}
        for name, file in known.items()
    }


def room_of(module: str) -> str:
    """`fedsim.models.norms.xan` -> `fedsim.models`; `clients.step.jigsaw` -> `clients`."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "fedsim" else parts[0]


def room_graph(graph: Graph) -> Graph:
    """Which room imports which."""
    rooms: dict[str, set[str]] = {room_of(module): set() for module in graph}
    for module, others in graph.items():
        rooms[room_of(module)] |= {room_of(other) for other in others} - {room_of(module)}
    return rooms


def circles(graph: Graph) -> list[set[str]]:
    """The groups of names that import each other in a circle, the largest first."""

    @cache
    def reached(start: str) -> frozenset[str]:
        seen, waiting = set(), [start]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        return frozenset(seen)

    groups = {frozenset(other for other in reached(name) if name in reached(other)) for name in graph}
    return sorted((set(group) for group in groups if group), key=len, reverse=True)


def floors(graph: Graph) -> int:
    """The number of names on the longest way down; a circle is one floor."""
    home = {name: min(circle) for circle in circles(graph) for name in circle}
    merged: dict[str, set[str]] = {home.get(name, name): set() for name in graph}
    for name, others in graph.items():
        here = home.get(name, name)
        merged[here] |= {home.get(other, other) for other in others} - {here}
    depth: dict[str, int] = {}
    for name in TopologicalSorter(merged).static_order():
        depth[name] = 1 + max((depth[other] for other in merged[name]), default=0)
    return max(depth.values())


def flags(tree: Path) -> dict[str, set[str]]:
    """{flag: classes that declare it beside its contract}: the ClassVars of the classes that parts derive from."""
    classes = [
        node for file in modules(tree).values() for node in ast.walk(parsed(file)) if isinstance(node, ast.ClassDef)
    ]
    parents = {node.name: {base.id for base in node.bases if isinstance(base, ast.Name)} for node in classes}

    def is_part(name: str) -> bool:
        return name == "Part" or any(is_part(parent) for parent in parents.get(name, ()))

    parts = [node for node in classes if is_part(node.name)]
    contracts = {node.name for node in parts if not node.decorator_list}  # what fills a slot is a dataclass
    found = {key: set() for node in parts if node.name in contracts for key in _declared(node, class_var=True)}
    for node in parts:
        if node.name not in contracts:
            for key in found.keys() & _declared(node):
                found[key].add(node.name)
    return found


def _declared(node: ast.ClassDef, class_var: bool = False) -> set[str]:
    """The names that a class body gives a value or a type; with `class_var` those that are annotated as ClassVar."""
    typed = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    if class_var:
        return {each.target.id for each in typed if ast.unparse(each.annotation).startswith("ClassVar")}
    plain = [target for each in node.body if isinstance(each, ast.Assign) for target in each.targets]
    return {target.id for target in [*plain, *(each.target for each in typed)] if isinstance(target, ast.Name)}


def methods_named(tree: Path, name: str) -> dict[str, int]:
    """{module: how many methods of that name it defines}."""
    texts = {module: ast.walk(parsed(file)) for module, file in modules(tree).items()}
    counts = {
        module: sum(isinstance(node, ast.FunctionDef) and node.name == name for node in nodes)
        for module, nodes in texts.items()
    }
    return {module: count for module, count in counts.items() if count}


def lines(*folders: Path) -> int:
    """The lines of all Python files in these folders."""
    return sum(file.read_text(encoding="utf-8").count("\n") for folder in folders for file in folder.rglob("*.py"))


def counts(tree: Path) -> dict[str, int | str]:
    """All counts of one tree, by what they count."""
    graph = module_graph(tree)
    rooms = room_graph(graph)
    declared = flags(tree)
    refuses = methods_named(tree, "refuses")
    return {
        "rooms": len(rooms),
        "pairs of rooms, one imports the other": sum(map(len, rooms.values())),
        "circles of rooms (rooms in each)": " ".join(str(len(circle)) for circle in circles(rooms)) or "none",
        "floors of rooms": floors(rooms),
        "modules": len(graph),
        "circles of modules (modules in each)": " ".join(str(len(circle)) for circle in circles(graph)) or "none",
        "floors of modules": floors(graph),
        "flags of parts": len(declared),
        "flags that three classes or fewer declare": sum(len(classes) <= 3 for classes in declared.values()),
        "methods `refuses`": sum(refuses.values()),
        "files with `refuses`": len(refuses),
        "lines of code": lines(*(tree / package for package in PACKAGES)),
        "lines of tests": lines(tree / "tests"),
    }


def main(trees: list[str]) -> None:
    """Print the counts of all trees as a table, and the circles of the last one."""
    columns = [counts(Path(tree)) for tree in trees]
    for key in columns[0]:
        print(f"{key:<45}" + "".join(f"{column[key]:>12}" for column in columns))
    for circle in circles(module_graph(Path(trees[-1]))):
        print("circle:", ", ".join(sorted(circle)))


if __name__ == "__main__":
    main(sys.argv[1:] or [str(Path(__file__).parents[2])])
