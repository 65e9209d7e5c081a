"""The house does not grow again unnoticed: functions, files, sentences, rooms, imports, what processes import."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from house.count import PARTS, VAGUE, floors, folders, graphs, imported_once, size_of, vague_names

ROOT = Path(__file__).parents[2]
FOLDERS = ("fedsim", "strategies", "clients", "tests", "benchmarks", "docs")
ROOMS, PAIRS, FLOORS = 22, 125, 13  # whoever needs more says here what for: apps and Python give methods as objects
MOST_NODES, MOST_OF_PARTS = 10.0, 12.5  # in a line of code of the machinery, and where formulas live
MACHINERY = "strategies/wire"  # a folder without formulas among those of parts
MOST_VAGUE = 15  # local variables with one of the names in VAGUE
IMPORTED_ONCE = 55  # a verb, a study, a model family or a runtime has a file of its own
MOST = 30
ITEM = re.compile(r"[-*] |[\w`*./(][\w`*.,/() -]{0,60}: ")  # an item of a list, or a field and its meaning
END = re.compile(r"(?<=[.!?;:])\)?\s+(?=[\w`(\"'])")
HEAVY = ("ray", "torchvision", "torch._dynamo", "flwr.simulation", "scipy", "sklearn", "matplotlib")
BENCHES = ("fedsim.analysis", "fedsim.commands", "fedsim.deploy", "fedsim.export", "fedsim.studies", "fedsim.testing")
RUN_ALONE = """
import sys
from pathlib import Path
for bench in sys.argv[2:]:
    sys.modules[bench] = None
sys.modules["pandas"] = None
import fedsim
for name, more in (("digits", ["data.fraction=0.05"]), ("hospitals", [])):
    folder = fedsim.launch(fedsim.read_experiment(name, ["train.rounds=1", *more, "run.output=" + sys.argv[1]]))
    print((folder / "summary.csv").is_file())
"""
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


def test_functions_are_not_dense(tmp_path):
    """What is bounded is the number of syntax nodes, and not that of lines: one thing stands on a line."""
    files = [file for each in folders(ROOT).values() for file in each]
    files += [file for folder in ("benchmarks", "docs") for file in (ROOT / folder).glob("*.py")]
    assert size_of(files).large == ()
    (tmp_path / "a.py").write_text("def small():\n    return 1\ndef large():\n" + "    a = b + c\n" * 40)
    assert [name for name, _ in size_of([tmp_path / "a.py"]).large] == ["a.py: large"]


def test_lines_of_code_are_not_dense(tmp_path):
    """Docstrings and comments are no lines of code."""
    dense = {folder: size_of(files).density for folder, files in folders(ROOT).items()}
    too_dense = {}
    for folder, nodes in dense.items():
        has_formulas = folder.startswith(PARTS) and folder != MACHINERY
        if nodes > (MOST_OF_PARTS if has_formulas else MOST_NODES):
            too_dense[folder] = round(nodes, 2)
    assert too_dense == {}
    (tmp_path / "a.py").write_text('"""Text."""\n\n# a comment\na = 1\nb = (\n    2\n)\n')
    size = size_of([tmp_path / "a.py"])
    assert (size.lines, size.code) == (7, 4)


def test_local_names_are_nouns_of_the_field():
    """Names such as `own` and `found` say nothing: they may stay where a value lives for a line or two."""
    names = vague_names([file for each in folders(ROOT).values() for file in each])
    assert {name: names[name] for name in VAGUE if names[name] > MOST_VAGUE} == {}


def test_few_modules_exist_for_one_other_alone():
    modules, _ = graphs(ROOT)
    assert len(imported_once(modules)) <= IMPORTED_ONCE, imported_once(modules)


def test_rooms_do_not_grow_nothing_imports_in_a_circle_and_no_module_hides_one_of_python():
    modules, rooms = graphs(ROOT)
    assert len(rooms) <= ROOMS, sorted(rooms)
    assert sum(map(len, rooms.values())) <= PAIRS
    assert floors(rooms) <= FLOORS
    for graph in (rooms, modules):
        TopologicalSorter(graph).prepare()  # a CycleError names the circle
    assert {name.split(".")[0] for name in modules}.isdisjoint(sys.stdlib_module_names)
    assert floors({"a": {"b"}, "b": {"a", "c"}, "c": set()}) == 2  # a and b are a circle


def test_six_files_show_a_run():
    """The README names them in the order in which they are read: five files, and a function of the last one."""
    section = (ROOT / "README.md").read_text().split("## Read the code")[1].split("\n## ")[0]
    files = re.findall(r"^\d\. \[`(.+?)`\]\((.+?)\)", section, re.M)
    assert len(files) == 6
    assert [name for name, link in files if name != link] == ["end_round"]
    assert sum(lines_to_read(ROOT / link, name if name != link else "") for name, link in files) < 1000


def lines_to_read(file: Path, function: str) -> int:
    """How many lines a file has, or its function of this name."""
    if not function:
        return len(file.read_text().splitlines())
    nodes = [node for node in ast.walk(parsed(file)) if isinstance(node, ast.FunctionDef) and node.name == function]
    (node,) = nodes
    return node.end_lineno - node.lineno + 1


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


def test_a_run_needs_no_bench_and_no_pandas(tmp_path):
    """Each of them could be deleted: the engine runs where none can be imported. Only tables of users need pandas."""
    words = [sys.executable, "-c", RUN_ALONE, str(tmp_path), *BENCHES]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "True\nTrue\n", done.stderr


def test_a_run_of_digits_and_its_predictions_import_nothing_heavy(tmp_path):
    """torchvision takes two seconds, PyTorch's compiler one; Ray and Flower's simulation need not be installed."""
    words = [sys.executable, "-c", CODE, str(tmp_path), *HEAVY]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2:] == ["", ""], done.stdout
