"""The house does not grow again unnoticed: functions, files, sentences, rooms, imports, what processes import."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from house.count import floors, graphs

ROOT = Path(__file__).parents[2]
FOLDERS = ("fedsim", "strategies", "clients", "tests", "benchmarks", "docs")
ROOMS, PAIRS, FLOORS = 21, 122, 14  # whoever needs more says here what for
MOST = 30
ITEM = re.compile(r"[-*] |[\w`*./(][\w`*.,/() -]{0,60}: ")  # an item of a list, or a field and its meaning
END = re.compile(r"(?<=[.!?;:])\)?\s+(?=[\w`(\"'])")
HEAVY = ("ray", "torchvision", "torch._dynamo", "flwr.simulation", "scipy", "sklearn", "matplotlib")
CODE = """
import sys
from pathlib import Path
from PIL import Image
sys.modules["ray"] = None
from fedsim.export.cli import predict
from fedsim.settings.experiment import read_experiment
from fedsim.runtime.launch import launch
folder = launch(read_experiment("digits", ["train.rounds=1", "data.fraction=0.05", "run.output=" + sys.argv[1]]))
Image.new("L", (28, 28)).save("one.png")
predict(folder, [Path("one.png")])
print(*(name for name in sys.argv[2:] if sys.modules.get(name) is not None))
"""


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def too_long(file: Path) -> Iterator[str]:
    """The names of a file and of its functions that have too many lines: 500, and 50."""
    text = file.read_text(encoding="utf-8")
    if text.count("\n") >= 500:
        yield file.name
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 49:
            yield f"{file.name}: {node.name}"


def test_functions_and_files_are_short(tmp_path):
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    assert [name for file in files for name in too_long(file)] == []
    (tmp_path / "a.py").write_text("def short():\n" + "    pass\n" * 48 + "def long():\n" + "    pass\n" * 49)
    assert list(too_long(tmp_path / "a.py")) == ["a.py: long"]


def test_rooms_do_not_grow_nothing_imports_in_a_circle_and_no_module_hides_one_of_python():
    modules, rooms = graphs(ROOT)
    assert len(rooms) <= ROOMS, sorted(rooms)
    assert sum(map(len, rooms.values())) <= PAIRS
    assert floors(rooms) <= FLOORS
    for graph in (rooms, modules):
        TopologicalSorter(graph).prepare()  # a CycleError names the circle
    assert {name.split(".")[0] for name in modules}.isdisjoint(sys.stdlib_module_names)
    assert floors({"a": {"b"}, "b": {"a", "c"}, "c": set()}) == 2  # a and b are a circle


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
    """At most 30 words, so that a reader in a second language follows them at once."""
    long = [
        f"{file.relative_to(ROOT)}: {name}: {sentence}"
        for package in ("fedsim", "strategies", "clients")
        for file in sorted((ROOT / package).rglob("*.py"))
        for name, text in public(parsed(file))
        for sentence in sentences(text)
        if len(re.findall(r"\b[A-Za-z][\w'-]*", sentence)) > MOST
    ]
    assert long == []
    words = " ".join(["word"] * 31)
    found = [len(each.split()) for each in sentences(f"A title.\n\n{words}.\n\n    {words}\n\n- one\n- {words}")]
    assert found == [2, 31, 2, 32]


def test_a_run_of_digits_and_its_predictions_import_nothing_heavy(tmp_path):
    """torchvision takes two seconds, PyTorch's compiler one; Ray and Flower's simulation need not be installed."""
    words = [sys.executable, "-c", CODE, str(tmp_path), *HEAVY]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2:] == ["", ""], done.stdout
