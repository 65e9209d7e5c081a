"""Counts what makes a tree of fedsim hard to read: `python tests/house/count.py [TREE ...] [--run]`.

The first table has a line for each folder: files, lines, lines of code (without comments and docstrings), syntax nodes
in a line of code, and functions of 350 nodes or more. The second has the whole: rooms and what they import, modules
that only one other module imports, and how often vague names are given to local variables. With --run, it also counts
the files that execute in `fedsim run digits` with two rounds in one process.

A room is a file of fedsim's root or a folder in it; clients/ and strategies/ are a room each. Imports inside functions
and for type checkers count, too. A flag is a name that a class of a part declares as a ClassVar.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import numpy as np
from scipy.sparse.csgraph import connected_components

PACKAGES = ("fedsim", "clients", "strategies")
# Folders of parts: their formulas are dense by nature.
PARTS = ("clients", "strategies", "fedsim/models")
# A file of a slot's folder, such as clients.terms.proximal.
PART = re.compile(r"(clients|strategies)\.(?!wire|tools)\w+\.\w+|fedsim\.models\.(norms|inserts|infer)\.\w+")
FLAG, REFUSES = re.compile(r"^    (\w+): ClassVar\b", re.M), re.compile(r"^    def refuses\(", re.M)
LARGE = 350  # syntax nodes of a function
VAGUE = ("own", "found", "known", "kept", "wanted", "words", "said", "whole")
SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
Graph = Mapping[str, set[str]]  # {name: the names that it imports}
RUN = """
import sys
from fedsim.runtime.launch import launch
from fedsim.settings.experiment import read_experiment
seen = set()
def trace(frame, event, argument):
    seen.add(frame.f_code.co_filename)
sys.setprofile(trace)
launch(read_experiment("digits", ["train.rounds=2", "run.processes=1", "run.output=" + sys.argv[1]]))
sys.setprofile(None)
print(*sorted(file for file in seen if file.endswith(".py")), sep="\\n", file=open(sys.argv[2], "w"))
"""


@dataclass(frozen=True)
class Size:
    """What is counted of some files; `large` are the names of functions of LARGE nodes or more, with their nodes."""

    files: int
    lines: int
    code: int
    nodes: int
    large: tuple[tuple[str, int], ...]

    @property
    def density(self) -> float:
        """Syntax nodes in a line of code."""
        return self.nodes / max(self.code, 1)


@cache
def size_of_file(file: Path) -> Size:
    """The size of one file."""
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and is_docstring(node):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    sizes = [(f"{file.name}: {node.name}", sum(1 for _ in ast.walk(node))) for node in functions]
    large = tuple((name, nodes) for name, nodes in sizes if nodes >= LARGE)
    return Size(1, text.count("\n"), len(lines), sum(1 for _ in ast.walk(tree)), large)


def is_docstring(node: ast.AST) -> bool:
    """Whether a module, class or function begins with a docstring."""
    return ast.get_docstring(node, clean=False) is not None


def size_of(files: list[Path]) -> Size:
    """The size of several files together."""
    sizes = [size_of_file(file) for file in files]
    totals = (sum(getattr(size, name) for size in sizes) for name in ("files", "lines", "code", "nodes"))
    return Size(*totals, tuple(large for size in sizes for large in size.large))


def folders(tree: Path) -> dict[str, list[Path]]:
    """The Python files of the product by folder: fedsim's folders, strategies and its wire, clients."""
    found: dict[str, list[Path]] = {}
    for package in PACKAGES:
        for file in sorted((tree / package).rglob("*.py")):
            parts = file.relative_to(tree).parts
            depth = 2 if package == "fedsim" and len(parts) > 2 else 1
            folder = "strategies/wire" if parts[:2] == ("strategies", "wire") else "/".join(parts[:depth])
            found.setdefault(folder, []).append(file)
    return found


def vague_names(files: list[Path]) -> Counter[str]:
    """How often each of VAGUE is given to a local variable."""
    names: Counter[str] = Counter()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
                names[node.id] += 1
    return names


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


def imported_once(modules: Graph) -> list[str]:
    """The modules that exactly one other module imports; without packages, and without the files of parts.

    A part is imported by the table of methods alone, and stands alone by design.
    """
    importers: Counter[str] = Counter(other for others in modules.values() for other in others)
    packages = {name.rpartition(".")[0] for name in modules}
    single = (name for name, count in importers.items() if count == 1 and name not in packages)
    return sorted(name for name in single if not PART.match(name))


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


def executed(tree: Path, folder: Path) -> tuple[int, int]:
    """(files of the product that execute in a run of digits, their lines)."""
    listed = folder / "files.txt"
    words = [sys.executable, "-c", RUN, str(folder / "outputs"), str(listed)]
    subprocess.run(words, check=True, capture_output=True, env={"PYTHONPATH": str(tree), "PATH": ""}, cwd=folder)
    inside = [Path(line) for line in listed.read_text().splitlines()]
    files = [file for file in inside if file.is_relative_to(tree) and file.relative_to(tree).parts[0] in PACKAGES]
    return len(files), sum(file.read_text(encoding="utf-8").count("\n") for file in files)


def counts(tree: Path) -> Iterator[tuple[str, int]]:
    """All counts of a tree as a whole, by what they count."""
    modules, rooms = graphs(tree)
    files = [file for each in folders(tree).values() for file in each]
    code = "".join(file.read_text(encoding="utf-8") for file in files)
    yield from (("rooms", len(rooms)), ("pairs that import", sum(map(len, rooms.values()))), ("floors", floors(rooms)))
    sizes = np.bincount(circles(modules))
    yield "circles of files", int((sizes > 1).sum())
    yield "modules imported once", len(imported_once(modules))
    yield from (("flags", len(set(FLAG.findall(code)))), ("methods refuses", len(REFUSES.findall(code))))
    yield "lines of the product", code.count("\n")
    yield f"functions of {LARGE} nodes", len(size_of(files).large)
    names = vague_names(files)
    yield from ((f"locals called {name}", names[name]) for name in VAGUE)
    yield "lines of tests", sum(file.read_text().count("\n") for file in (tree / "tests").rglob("*.py"))


def main(*options: str) -> None:
    """Prints the tables of the trees."""
    trees = [Path(word).resolve() for word in options if word != "--run"] or [Path(__file__).resolve().parents[2]]
    for tree in trees:
        print(f"{'folder':20}{'files':>7}{'lines':>8}{'code':>8}{'nodes a line':>14}{'large':>7}")
        for folder, files in folders(tree).items():
            size = size_of(files)
            print(f"{folder:20}{size.files:7}{size.lines:8}{size.code:8}{size.density:14.1f}{len(size.large):7}")
        for name, nodes in sorted(size_of([file for each in folders(tree).values() for file in each]).large):
            print(f"    {nodes} nodes: {name}")
    for rows in zip(*(list(counts(tree)) for tree in trees)):
        print(f"{rows[0][0]:28}", *(f"{number:>8}" for _, number in rows))
    if "--run" in options:
        import tempfile

        for tree in trees:
            with tempfile.TemporaryDirectory() as folder:
                print("files and lines that execute in a run of digits:", *executed(tree, Path(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
